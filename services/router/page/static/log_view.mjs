// The conversation on the page: its turns, drawn once a frame, kept at the end while one is there.

import { AnswerView } from "./answer_view.mjs";
import { element } from "./element.mjs";
import { MarkdownView } from "./markdown/view.mjs";

const NEAR_END_PX = 48;

export class LogView {
  /** @type {Map<import("./answer.mjs").Answer, AnswerView>} */
  #views = new Map();
  /** @type {Set<import("./answer.mjs").Answer>} */
  #changed = new Set();
  #frame = 0;
  #follows = true;
  #lastTop = 0;

  /**
   * @param {HTMLElement} log
   * @param {HTMLElement} scroller
   * @param {HTMLElement} toEnd
   * @param {import("./settings.mjs").Settings} settings
   */
  constructor(log, scroller, toEnd, settings) {
    this.log = log;
    this.scroller = scroller;
    this.toEnd = toEnd;
    this.settings = settings;
    scroller.addEventListener("scroll", () => this.#scrolled(), { passive: true });
    new ResizeObserver(() => this.#keepAtEnd()).observe(log);
    new ResizeObserver(() => this.#keepAtEnd()).observe(scroller);
  }

  /** @param {import("./chat.mjs").Chat} chat */
  show(chat) {
    this.#views.clear();
    this.log.replaceChildren();
    chat.turns.forEach((turn, index) => {
      if (turn.role === "user") this.addQuestion(turn.content);
      else this.addAnswer(turn.answer, index === chat.turns.length - 1).end();
    });
  }

  /** @param {string} content */
  addQuestion(content) {
    const bubble = element("div", { class: "bubble text" });
    new MarkdownView(bubble).update(content, false);
    this.log.append(
      element("article", { class: "question", "aria-label": "Question" }, [
        bubble,
        element("button", { type: "button", class: "quiet", "data-action": "edit", text: "Edit" }),
      ]),
    );
  }

  /**
   * Remove the answers to the last question, and on demand the question.
   * @param {boolean} [withQuestion]
   */
  dropLast(withQuestion = false) {
    const last = [...this.log.querySelectorAll(".question")].pop();
    while (last?.nextSibling) last.nextSibling.remove();
    if (withQuestion) last?.remove();
    for (const [answer, view] of this.#views) if (!view.root.isConnected) this.#views.delete(answer);
  }

  /** @param {import("./answer.mjs").Answer} answer @param {boolean} [isLast] */
  addAnswer(answer, isLast = true) {
    const view = new AnswerView(answer, isLast && this.settings.stagesOpen);
    this.#views.set(answer, view);
    this.log.append(view.root);
    view.update();
    return view;
  }

  /**
   * Draw an answer with the next frame, however often it changes until then.
   * @param {import("./answer.mjs").Answer} answer
   */
  changed(answer) {
    this.#changed.add(answer);
    this.#frame ||= requestAnimationFrame(() => this.#draw());
  }

  /** @param {Element} inside @returns {import("./answer.mjs").Answer | null} */
  answerOf(inside) {
    for (const [answer, view] of this.#views) if (view.root.contains(inside)) return answer;
    return null;
  }

  /** What opens now is looked at: its beginning must not be scrolled away. */
  stay() {
    this.#follows = false;
  }

  follow() {
    this.#follows = true;
    this.#keepAtEnd();
  }

  #draw() {
    this.#frame = 0;
    for (const answer of this.#changed) {
      const view = this.#views.get(answer);
      if (answer.state === "streaming") view?.update();
      else view?.end();
    }
    this.#changed.clear();
  }

  #scrolled() {
    const { scrollHeight, scrollTop, clientHeight } = this.scroller;
    const isAtEnd = scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
    // Text that came since the last scrolling is no reason to stop following it; going up is.
    if (isAtEnd) this.#follows = true;
    else if (scrollTop < this.#lastTop) this.#follows = false;
    this.#lastTop = scrollTop;
    this.toEnd.hidden = this.#follows || isAtEnd;
  }

  #keepAtEnd() {
    if (this.#follows) this.scroller.scrollTop = this.scroller.scrollHeight;
    else this.#scrolled();
  }
}
