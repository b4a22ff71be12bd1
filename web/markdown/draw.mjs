// Elements out of Markdown's tree. All text goes in as text nodes; no markup is ever parsed.

import { element } from "../element.mjs";
import { CodeView } from "./code_view.mjs";
import { renderFormula } from "./mathml.mjs";

/** @param {import("./blocks.mjs").Block} block @returns {HTMLElement} */
export function drawBlock(block) {
  switch (block.kind) {
    case "code": {
      const view = new CodeView(block.language);
      view.update(block.text);
      return view.root;
    }
    case "heading":
      return element(`h${Math.min(6, block.level + 1)}`, { dir: "auto" }, drawInline(block.children));
    case "quote":
      return element("blockquote", {}, block.blocks.map(drawBlock));
    case "rule":
      return element("hr");
    case "math":
      return scrollable("formula", "Formula", /** @type {any} */ (renderFormula(block.text, true)));
    case "table":
      return scrollable("table", "Table", drawTable(block));
    case "list":
      return element(
        block.ordered ? "ol" : "ul",
        { start: block.ordered && block.start !== 1 ? block.start : null },
        block.items.map(drawItem),
      );
    default:
      return element("p", { dir: "auto" }, drawInline(block.children));
  }
}

/** What may be wider than the column scrolls by itself, also by keys. @param {string} name @param {string} label @param {HTMLElement} inside */
function scrollable(name, label, inside) {
  return element("div", { class: name, tabindex: 0, role: "group", "aria-label": label }, [inside]);
}

/** @param {Extract<import("./blocks.mjs").Block, {kind: "table"}>} table */
function drawTable({ align, head, rows }) {
  const parts = [element("thead", {}, [drawRow("th", head, align)])];
  if (rows.length) parts.push(element("tbody", {}, rows.map((cells) => drawRow("td", cells, align))));
  return element("table", {}, parts);
}

/** @param {string} tag @param {import("./inline.mjs").Inline[][]} cells @param {string[]} align */
export function drawRow(tag, cells, align) {
  return element("tr", {}, cells.map((cell, column) =>
    element(tag, { class: align[column] === "start" ? null : `align-${align[column]}`, dir: "auto" }, drawInline(cell))));
}

/** @param {import("./blocks.mjs").Block[]} blocks */
export function drawItem(blocks) {
  const [first, ...rest] = blocks;
  if (first?.kind !== "paragraph") return element("li", {}, blocks.map(drawBlock));
  const [begin, ...others] = first.children;
  const task = typeof begin === "string" ? /^\[([ xX])\] /.exec(begin) : null;
  const shown = task
    ? [task[1] === " " ? "☐ " : "☑ ", /** @type {string} */ (begin).slice(task[0].length), ...others]
    : first.children;
  return element("li", { class: task ? "task" : null, dir: "auto" }, [...drawInline(shown), ...rest.map(drawBlock)]);
}

/** @param {import("./inline.mjs").Inline[]} children @returns {(Node | string)[]} */
function drawInline(children) {
  return children.map((child) => {
    if (typeof child === "string") return child;
    if (child.kind === "math") return renderFormula(child.text, false);
    if (child.kind !== "link") return element(child.kind, {}, drawInline(child.children));
    if (!child.address) return element("span", { class: "link-begun" }, drawInline(child.children));
    const { address } = child;
    return element("a", { href: address, title: address, target: "_blank", rel: "noopener noreferrer" }, drawInline(child.children));
  });
}
