// A block of code that may still grow: lines that are complete are coloured once and stay.

import { element } from "../element.mjs";
import { Highlighter } from "./highlight.mjs";

export class CodeView {
  #done = 0; // characters of the lines that are complete
  /** @type {Node[]} The nodes of the line that is not. */
  #open = [];

  /** @param {string} language */
  constructor(language) {
    this.highlighter = new Highlighter(language);
    this.code = element("code");
    this.root = element("div", { class: "code" }, [
      element("div", { class: "code-head" }, [
        element("span", { text: language || "text" }),
        element("button", { type: "button", class: "quiet", "data-action": "copy-code", "aria-label": "Copy code", text: "Copy" }),
      ]),
      element("pre", { tabindex: 0, "aria-label": "Code" }, [this.code]),
    ]);
  }

  /** Show a text that begins with what was shown before. @param {string} text */
  update(text) {
    for (const node of this.#open) this.code.removeChild(node);
    const end = text.lastIndexOf("\n") + 1;
    if (end > this.#done) {
      const lines = text.slice(this.#done, end - 1).split("\n");
      this.code.append(...merged(lines.flatMap((line) => [...this.highlighter.line(line), ["", "\n"]])));
      this.#done = end;
    }
    this.#open = merged(this.highlighter.copy().line(text.slice(end)));
    this.code.append(...this.#open);
  }
}

/** Nodes of tokens, with texts without a colour joined. @param {string[][]} tokens @returns {Node[]} */
function merged(tokens) {
  /** @type {Node[]} */
  const nodes = [];
  for (const [kind, text] of tokens) {
    const last = nodes[nodes.length - 1];
    if (kind) nodes.push(element("span", { class: `code-${kind}`, text }));
    else if (last instanceof Text) last.appendData(text);
    else nodes.push(document.createTextNode(text));
  }
  return nodes;
}
