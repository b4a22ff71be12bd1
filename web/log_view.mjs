// The conversation on the page: its turns, drawn once a frame, kept at the end while one is there.

import { AnswerView } from "./answer_view.mjs";
import { questionView, switcher } from "./question_view.mjs";

const NEAR_END_PX = 48;

export class LogView {
  /** @type {Map<import("./answer.mjs").Answer, AnswerView>} */
  #views = new Map();
  /** @type {WeakMap<Element, import("./chats/chat.mjs").Turn>} */
  #turns = new WeakMap();
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

  /** Show a conversation's branch; what is there already stays. @param {import("./chats/chat.mjs").Chat} chat */
  show(chat) {
    const branch = chat.branch();
    const shown = [...this.log.children];
    let same = 0;
    while (same < shown.length && this.#turns.get(shown[same]) === chat.turns[branch[same]]) same += 1;
    for (const node of shown.slice(same)) node.remove();
    for (const [answer, view] of this.#views) if (!view.root.isConnected) this.#views.delete(answer);
    branch.slice(same).forEach((index, at) => {
      const node = this.#draw(chat, index, same + at === branch.length - 1);
      this.#turns.set(node, chat.turns[index]);
    });
  }

  /** Draw an answer anew that goes on, as its text may have changed. @param {import("./answer.mjs").Answer} answer */
  renew(answer) {
    this.#views.get(answer)?.root.remove();
  }

  /** @param {import("./chats/chat.mjs").Chat} chat @param {number} index @param {boolean} isLast */
  #draw(chat, index, isLast) {
    const turn = chat.turns[index];
    const versions = chat.versions(index);
    if (turn.role !== "assistant") {
      const node = questionView(/** @type {any} */ (turn), index, versions);
      this.log.append(node);
      return node;
    }
    const { answer } = turn;
    const view = new AnswerView(answer, isLast && this.settings.stagesOpen, switcher(index, versions, "answer"));
    this.#views.set(answer, view);
    this.log.append(view.root);
    if (answer.state === "streaming") view.update();
    else view.end();
    return view.root;
  }

  /**
   * Draw an answer with the next frame, however often it changes until then.
   * @param {import("./answer.mjs").Answer} answer
   */
  changed(answer) {
    this.#changed.add(answer);
    this.#frame ||= requestAnimationFrame(() => this.#drawChanged());
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

  #drawChanged() {
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
