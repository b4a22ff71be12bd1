// Draws a text that grows: blocks that are complete stay, and what is open is changed in place, so
// that nothing flickers, selections hold, and what was scrolled stays where it is.

import { readBlocks } from "./blocks.mjs";
import { CodeView } from "./code_view.mjs";
import { drawBlock } from "./draw.mjs";
import { patchBlock } from "./patch.mjs";

/** @typedef {import("./blocks.mjs").Block} Block */

export class MarkdownView {
  #from = 0; // where the open blocks begin
  /** @type {{block: Block, node: HTMLElement}[]} */
  #open = [];
  /** @type {{view: CodeView, length: number} | null} A code block that only grows. */
  #code = null;
  #head = ""; // the line that began it

  /** @param {HTMLElement} host */
  constructor(host) {
    this.host = host;
  }

  /**
   * @param {string} text all of it, which begins with what was given before
   * @param {boolean} growing whether more will come
   */
  update(text, growing) {
    const tail = text.slice(this.#from);
    if (growing && this.#growsCode(tail)) return;
    const { blocks, open, numClosed } = readBlocks(tail, growing);
    const last = blocks[blocks.length - 1];
    const code = this.#code?.view;
    this.#code = null;
    blocks.forEach((block, index) => {
      const before = this.#open[index];
      const isGrowing = block === last && block.kind === "code" && block.open && index === numClosed;
      if (isGrowing) {
        const view = this.#growing(block, code, tail.slice(open));
        if (!before) this.host.append(view.root);
        else if (before.node !== view.root) before.node.replaceWith(view.root);
      } else if (before) patchBlock(before.node, before.block, block);
      else this.host.append(drawBlock(block));
    });
    for (const { node } of this.#open.slice(blocks.length)) node.remove();
    const nodes = [...this.host.children].slice(this.host.children.length - (blocks.length - numClosed));
    this.#open = blocks.slice(numClosed).map((block, index) => ({ block, node: /** @type {HTMLElement} */ (nodes[index]) }));
    this.#from += open;
  }

  /**
   * The view of a code block whose end has not come: the one that is there, if it is the same block.
   * @param {Extract<Block, {kind: "code"}>} block @param {CodeView | undefined} before @param {string} source
   */
  #growing(block, before, source) {
    const head = source.slice(0, source.indexOf("\n") + 1);
    const view = before && head && this.#head === head ? before : new CodeView(block.language);
    view.update(block.text);
    this.#code = head ? { view, length: source.length } : null;
    this.#head = head;
    return view;
  }

  /**
   * Add to the open code block without reading it again: thousands of lines each frame are slow.
   * @param {string} tail
   */
  #growsCode(tail) {
    const code = this.#code;
    if (!code || !tail.startsWith(this.#head)) return false;
    const more = tail.slice(code.length);
    if (/[`~]/.test(more) || /(^|\n) {0,3}[`~]+\s*$/.test(tail.slice(Math.max(0, code.length - 80), code.length))) return false;
    code.view.update(tail.slice(this.#head.length));
    code.length = tail.length;
    return true;
  }
}
