// Formulas as MathML Core, which browsers draw themselves and screen readers read.

import { readTex } from "./tex.mjs";

/** @typedef {import("./tex.mjs").Tex} Tex */

const THIN_SPACE = /** @type {Tex} */ ({ kind: "space", em: 0.167 });
const MATHML = "http://www.w3.org/1998/Math/MathML";

/**
 * Make the element of a formula. Its source is kept beside it, for copying and for whoever asks.
 * @param {string} text TeX
 * @param {boolean} isBlock whether it has its lines to itself
 */
export function renderFormula(text, isBlock) {
  const math = make("math", [drawn(readTex(text))]);
  math.setAttribute("display", isBlock ? "block" : "inline");
  math.setAttribute("alttext", text);
  return math;
}

/**
 * @param {string} tag @param {(Node | string)[]} children
 * @param {Record<string, string>} [attributes]
 */
function make(tag, children, attributes = {}) {
  const made = document.createElementNS(MATHML, tag);
  for (const [name, value] of Object.entries(attributes)) made.setAttribute(name, value);
  made.append(...children);
  return made;
}

/** @param {Tex} tex @returns {Element} */
function drawn(tex) {
  switch (tex.kind) {
    case "row":
      return make("mrow", spaced(tex.children).map(drawn));
    case "letter":
      return make("mi", [tex.text]);
    case "upright":
    case "function":
      return make("mi", [tex.text], { mathvariant: "normal" });
    case "limit":
      return make("mo", [tex.text], { movablelimits: "true", form: "prefix", lspace: "0", rspace: "0.167em" });
    case "number":
      return make("mn", [tex.text]);
    case "operator":
      return make("mo", [tex.text]);
    case "delimiter":
      return make("mo", [tex.text], { stretchy: "false", lspace: "0", rspace: "0" });
    case "large":
      return make("mo", [tex.text], { largeop: "true", movablelimits: String(tex.limits) });
    case "text":
      return make("mtext", [tex.text.replaceAll(/^ | $/g, "\u00a0")]);
    case "source":
      return make("mtext", [tex.text], { class: "tex-source" });
    case "space":
      return make("mspace", [], { width: `${tex.em}em` });
    case "fraction":
      return make("mfrac", [drawn(tex.above), drawn(tex.below)], tex.line ? {} : { linethickness: "0" });
    case "root":
      return tex.index ? make("mroot", [drawn(tex.body), drawn(tex.index)]) : make("msqrt", [drawn(tex.body)]);
    case "script":
      return script(tex.base, tex.sub, tex.sup);
    case "accent":
      if (tex.mark === "_" || tex.mark === "‾") return make("mrow", [drawn(tex.base)], { class: tex.under ? "underlined" : "overlined" });
      return tex.under
        ? make("munder", [drawn(tex.base), make("mo", [tex.mark], { stretchy: "true" })])
        : make("mover", [drawn(tex.base), make("mo", [tex.mark])], { accent: "true" });
    case "over":
      return stacked(tex.base, tex.below, tex.above);
    case "fenced":
      return fenced(tex.open, tex.close, tex.body);
    default:
      return table(tex.rows, tex.look);
  }
}

/**
 * Set thin spaces around names of functions, but not before a bracket: `n log n`, `log(n)`.
 * @param {Tex[]} children
 * @returns {Tex[]}
 */
function spaced(children) {
  return children.flatMap((child, index) => {
    const before = children[index - 1];
    const isAfter = before && isFunction(before) && !["delimiter", "fenced", "operator", "space"].includes(child.kind);
    const isBefore = before && isFunction(child) && /^(letter|number|upright|script|fraction|root|fenced)$/.test(before.kind);
    return isAfter || isBefore ? [THIN_SPACE, child] : [child];
  });
}

/** @param {Tex} tex @returns {boolean} */
function isFunction(tex) {
  return tex.kind === "function" || (tex.kind === "script" && isFunction(tex.base));
}

/** @param {Tex} base @param {Tex | null} sub @param {Tex | null} sup */
function script(base, sub, sup) {
  const hasLimits = base.kind === "limit" || (base.kind === "large" && base.limits) || (base.kind === "accent" && /[⏞⏟]/.test(base.mark));
  if (hasLimits) return stacked(base, sub, sup);
  const parts = [drawn(base), ...[sub, sup].flatMap((part) => (part ? [drawn(part)] : []))];
  return make(sub && sup ? "msubsup" : sub ? "msub" : "msup", parts);
}

/** @param {Tex} base @param {Tex | null} below @param {Tex | null} above */
function stacked(base, below, above) {
  const parts = [drawn(base), ...[below, above].flatMap((part) => (part ? [drawn(part)] : []))];
  return make(below && above ? "munderover" : below ? "munder" : above ? "mover" : "mrow", parts);
}

/** @param {string} open @param {string} close @param {Tex} body */
function fenced(open, close, body) {
  const before = open ? [make("mo", [open], { fence: "true", form: "prefix", stretchy: "true" })] : [];
  const after = close ? [make("mo", [close], { fence: "true", form: "postfix", stretchy: "true" })] : [];
  return make("mrow", [...before, drawn(body), ...after]);
}

/** @param {Tex[][]} rows @param {string} look */
function table(rows, look) {
  const lines = rows.map((cells) => make("mtr", cells.map((cell) => make("mtd", [drawn(cell)]))));
  return make("mtable", lines, { class: look, displaystyle: String(look === "aligned") });
}
