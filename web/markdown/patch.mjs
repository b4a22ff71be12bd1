// Changes what is drawn into what should be, with as few changes as may be: nodes that can stay do.

import { drawBlock, drawItem, drawRow } from "./draw.mjs";

/** @typedef {import("./blocks.mjs").Block} Block */

/**
 * Make the node of an old block show a new one. Items and rows that are as they were are not even
 * drawn again: lists and tables can be long, and usually only their ends grow.
 * @param {HTMLElement} node @param {Block} old @param {Block} fresh
 */
export function patchBlock(node, old, fresh) {
  if (old.kind === "list" && fresh.kind === "list" && old.ordered === fresh.ordered && old.start === fresh.start) {
    patchParts(node, old.items, fresh.items, drawItem);
    return;
  }
  if (old.kind === "table" && fresh.kind === "table" && isSame(old.align, fresh.align) && isSame(old.head, fresh.head)) {
    const body = node.querySelector("tbody");
    if (body) {
      patchParts(body, old.rows, fresh.rows, (row) => drawRow("td", row, fresh.align));
      return;
    }
  }
  if (isSame(old, fresh)) return;
  const drawn = drawBlock(fresh);
  if (!patch(node, drawn)) node.replaceWith(drawn);
}

/**
 * @template Part
 * @param {Element} parent @param {Part[]} old @param {Part[]} fresh @param {(part: Part) => HTMLElement} draw
 */
function patchParts(parent, old, fresh, draw) {
  fresh.forEach((part, index) => {
    const before = parent.children[index];
    if (before && isSame(old[index], part)) return;
    const drawn = draw(part);
    if (!before) parent.append(drawn);
    else if (!patch(before, drawn)) before.replaceWith(drawn);
  });
  while (parent.children.length > fresh.length) parent.lastElementChild?.remove();
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
  const [before, after] = [[...old.childNodes], [...fresh.childNodes]];
  after.forEach((node, index) => {
    if (!before[index]) old.appendChild(node);
    else if (!patch(before[index], node)) old.replaceChild(node, before[index]);
  });
  for (const node of before.slice(after.length)) node.remove();
  return true;
}

/** Whether two trees of plain objects are alike. @param {any} one @param {any} other @returns {boolean} */
function isSame(one, other) {
  if (one === other) return true;
  if (typeof one !== "object" || typeof other !== "object" || one === null || other === null) return false;
  const names = Object.keys(one);
  return names.length === Object.keys(other).length && names.every((name) => isSame(one[name], other[name]));
}
