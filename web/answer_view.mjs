// One answer on the page: reasoning, text or tokens, tool calls, what went wrong, stages, actions.

import { element } from "./element.mjs";
import { MarkdownView } from "./markdown/view.mjs";
import { StagesView } from "./stages_view.mjs";
import { tokenSpan } from "./token_tip.mjs";

const NOTES = new Map([
  ["stopped", "Stopped."],
  ["interrupted", "Interrupted: the page was left or reloaded while this answer came."],
]);

export class AnswerView {
  #numPieces = 0;
  #reasoningLength = 0;
  /** @type {{root: HTMLElement, args: Text, name: Text, result: HTMLElement}[]} */
  #calls = [];

  /**
   * @param {import("./answer.mjs").Answer} answer
   * @param {boolean} stagesOpen
   * @param {HTMLElement[]} versions the ways to its other versions
   */
  constructor(answer, stagesOpen, versions) {
    this.answer = answer;
    this.reasoningText = document.createTextNode("");
    this.reasoningLabel = element("span", { text: "Reasoning" });
    this.reasoning = element("details", { class: "reasoning", hidden: true }, [
      element("summary", {}, [this.reasoningLabel]),
      element("div", { class: "reasoning-text" }, [this.reasoningText]),
    ]);
    this.content = element("div", { class: "content text" });
    this.markdown = new MarkdownView(this.content);
    this.calls = element("div", { class: "calls" });
    this.note = element("p", { class: "note", hidden: true });
    this.problem = element("div", { class: "problem", role: "alert", hidden: true });
    this.stages = new StagesView(answer, stagesOpen);
    this.copy = element("button", { type: "button", class: "quiet", "data-action": "copy", text: "Copy" });
    this.goOn = element("button", { type: "button", class: "quiet", "data-action": "continue", text: "Continue" });
    this.actions = element("div", { class: "actions", hidden: true }, [
      ...versions,
      this.copy,
      this.goOn,
      element("button", { type: "button", class: "quiet", "data-action": "regenerate", text: "Regenerate" }),
    ]);
    this.root = element("article", { class: "answer", "aria-label": "Answer" }, [
      this.reasoning, this.content, this.calls, this.note, this.problem,
      element("div", { class: "under" }, [this.stages.root, this.actions]),
    ]);
  }

  /** Draw what is new. */
  update() {
    const { answer } = this;
    const streaming = answer.state === "streaming";
    this.root.setAttribute("aria-busy", String(streaming));
    this.#updateReasoning();
    if (answer.pieces.length) this.#updatePieces();
    else if (answer.content) this.markdown.update(answer.content, streaming);
    this.content.classList.toggle("streaming", streaming && !answer.calls.length);
    answer.calls.forEach((call, index) => this.#updateCall(call, index));
    if (streaming) this.stages.update();
  }

  /** Draw what is only known at the end. */
  end() {
    this.update();
    const { answer } = this;
    const cut = answer.finish === "length" ? "Cut off: the limit of tokens was reached." : "";
    const none = answer.state === "done" && !answer.content && !answer.calls.length ? "The answer is empty." : "";
    const note = NOTES.get(answer.state) ?? (cut || none);
    this.note.textContent = note;
    this.note.hidden = !note;
    this.#showProblem();
    this.stages.end();
    this.actions.hidden = Boolean(answer.problem) && !answer.content && this.actions.querySelector(".versions") === null;
    this.copy.hidden = !answer.content;
    this.goOn.hidden = !answer.canContinue;
  }

  #updateReasoning() {
    const { reasoning, times, state } = this.answer;
    if (!reasoning) return;
    this.reasoning.hidden = false;
    this.reasoningText.appendData(reasoning.slice(this.#reasoningLength));
    this.#reasoningLength = reasoning.length;
    const isThinking = state === "streaming" && times.reasoned === null;
    this.reasoningLabel.textContent = isThinking ? "Reasoning…" : "Reasoning";
  }

  #updatePieces() {
    const { pieces } = this.answer;
    if (!this.#numPieces) {
      this.content.classList.add("tokens");
      this.content.replaceChildren(); // what came before there were probabilities is among the pieces
    }
    for (; this.#numPieces < pieces.length; this.#numPieces += 1) {
      this.content.append(tokenSpan(pieces[this.#numPieces], this.#numPieces));
    }
  }

  /** @param {import("./answer.mjs").Call} call @param {number} index */
  #updateCall(call, index) {
    if (!this.#calls[index]) this.#addCall();
    const view = this.#calls[index];
    if (view.name.data !== call.name) view.name.data = call.name;
    const shown = view.args.data.length;
    if (call.arguments.length > shown) view.args.appendData(call.arguments.slice(shown));
    if (call.result !== undefined && view.result.hidden) {
      view.result.hidden = false;
      view.result.classList.toggle("failed", Boolean(call.failed));
      const label = call.failed ? "Failed" : call.name === "get_weather" ? "Invented sample" : "Result";
      view.result.append(element("span", { class: "label", text: label }), element("code", { text: call.result }));
    }
  }

  #addCall() {
    const name = document.createTextNode("");
    const args = document.createTextNode("");
    const result = element("div", { class: "call-result", hidden: true });
    const root = element("div", { class: "call", role: "group", "aria-label": "Tool call" }, [
      element("div", { class: "call-head" }, [
        element("span", { class: "label", text: "Tool" }),
        element("strong", { class: "call-name" }, [name]),
      ]),
      element("pre", { class: "call-args" }, [element("code", {}, [args])]),
      result,
    ]);
    this.calls.append(root);
    this.#calls.push({ root, args, name, result });
  }

  #showProblem() {
    const { problem } = this.answer;
    this.problem.hidden = !problem;
    if (!problem) return;
    const parts = [element("strong", { text: problem.title }), element("p", { text: problem.message })];
    if (problem.param) parts.push(element("p", { class: "hint" }, ["Field: ", element("code", { text: problem.param })]));
    if (problem.code) parts.push(element("p", { class: "hint" }, ["Code: ", element("code", { text: problem.code })]));
    if (problem.retryAfterS) {
      const seconds = problem.retryAfterS === 1 ? "a second" : `${problem.retryAfterS} seconds`;
      parts.push(element("p", { text: `The server asks to wait ${seconds} before the next try.` }));
    }
    parts.push(element("button", { type: "button", "data-action": "regenerate", text: "Try again" }));
    this.problem.replaceChildren(...parts);
  }
}
