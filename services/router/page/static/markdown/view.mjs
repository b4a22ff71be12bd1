// Draws a text that grows: blocks that are complete stay, and what is open is changed in place, so
// that nothing flickers, selections hold, and what was scrolled stays where it is.

import { readBlocks } from "./blocks.mjs";
import { CodeView } from "./code_view.mjs";
import { drawBlock } from "./draw.mjs";

export class MarkdownView {
  #from = 0; // where the open blocks begin
  /** @type {HTMLElement[]} */
  #open = [];
  /** @type {{view: CodeView, head: string, length: number} | null} A code block that only grows. */
  #code = null;

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
    const code = this.#code;
    this.#code = null;
    const drawn = blocks.map((block, index) => {
      if (block !== last || block.kind !== "code" || !block.open || index !== numClosed) return drawBlock(block);
      const lineEnd = tail.indexOf("\n", open);
      const head = lineEnd < 0 ? "" : tail.slice(open, lineEnd + 1);
      const view = code && code.head === head ? code.view : new CodeView(block.language);
      view.update(block.text);
      if (head) this.#code = { view, head, length: tail.length - open };
      return view.root;
    });
    patchAll(this.host, this.#open, drawn, this.#code?.view.root);
    // Nodes that were patched stay in the page; those that were drawn anew for them do not.
    this.#open = /** @type {HTMLElement[]} */ ([...this.host.children].slice(this.host.children.length - (blocks.length - numClosed)));
    this.#from += open;
  }

  /**
   * Add to the open code block without reading it again: thousands of lines each frame are slow.
   * @param {string} tail
   */
  #growsCode(tail) {
    const code = this.#code;
    if (!code || !tail.startsWith(code.head)) return false;
    const more = tail.slice(code.length);
    if (/[`~]/.test(more) || /(^|\n) {0,3}[`~]+\s*$/.test(tail.slice(Math.max(0, code.length - 80), code.length))) return false;
    code.view.update(tail.slice(code.head.length));
    code.length = tail.length;
    return true;
  }
}

/**
 * Make `old` nodes, the last ones of their parent, look like `fresh` ones, with as few changes as may be.
 * @param {Node} parent @param {Node[]} old @param {Node[]} fresh
 * @param {Node} [living] one of the fresh ones that must itself be in the page, as it will grow
 */
function patchAll(parent, old, fresh, living) {
  fresh.forEach((node, index) => {
    const before = old[index];
    if (!before) parent.appendChild(node);
    else if (before !== node && (node === living || !patch(before, node))) parent.replaceChild(node, before);
  });
  for (const node of old.slice(fresh.length)) parent.removeChild(node);
}

/** @param {Node} old @param {Node} fresh @returns {boolean} whether the old node could be kept */
function patch(old, fresh) {
  if (old.nodeName !== fresh.nodeName) return false;
  if (old instanceof Text && fresh instanceof Text) {
    if (fresh.data === old.data) return true;
    if (fresh.data.startsWith(old.data)) old.appendData(fresh.data.slice(old.length));
    else old.data = fresh.data;
    return true;
  }
  if (!(old instanceof Element) || !(fresh instanceof Element)) return false;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  patchAll(old, [...old.childNodes], [...fresh.childNodes]);
  return true;
}
