// Tokens with their probabilities: a span each, and one tooltip for the one that is looked at.

import { element } from "./element.mjs";

const LEVELS = 5; // of shading: the less likely, the darker

/**
 * Make the span of one piece of text.
 * @param {import("./answer.mjs").Piece} piece
 * @param {number} index
 */
export function tokenSpan(piece, index) {
  const attributes = { class: "token", "data-index": index, tabindex: index === 0 ? 0 : -1, text: piece.text };
  const span = element("span", attributes);
  const token = piece.tokens[piece.tokens.length - 1];
  if (token) span.dataset.level = String(level(token.logprob));
  return span;
}

/** The one tooltip of the page; pieces are found by whoever knows the answers. */
export class TokenTip {
  /** @type {HTMLElement | null} */
  #shownFor = null;

  /**
   * @param {HTMLElement} log
   * @param {HTMLElement} tip
   * @param {(span: HTMLElement) => import("./answer.mjs").Piece | null} pieceOf
   */
  constructor(log, tip, pieceOf) {
    this.tip = tip;
    this.pieceOf = pieceOf;
    const of = (/** @type {Event} */ event) =>
      /** @type {HTMLElement | null} */ (/** @type {Element} */ (event.target).closest?.(".token") ?? null);
    log.addEventListener("pointerover", (event) => this.#show(of(event)));
    log.addEventListener("click", (event) => this.#show(of(event)));
    log.addEventListener("focusin", (event) => this.#show(of(event)));
    log.addEventListener("focusout", () => this.hide());
    log.addEventListener("pointerleave", () => this.hide());
    log.addEventListener("keydown", (event) => this.#move(event, of(event)));
  }

  get isShown() {
    return this.#shownFor !== null;
  }

  hide() {
    this.#shownFor?.removeAttribute("aria-describedby");
    this.#shownFor = null;
    this.tip.hidden = true;
  }

  /** @param {HTMLElement | null} span */
  #show(span) {
    if (span === this.#shownFor) return;
    this.hide();
    const piece = span && this.pieceOf(span);
    if (!span || !piece?.tokens.length) return;
    this.tip.replaceChildren(...piece.tokens.slice(0, 4).map(described));
    this.tip.hidden = false;
    span.setAttribute("aria-describedby", this.tip.id);
    this.#shownFor = span;
    this.#place(span);
  }

  /** @param {HTMLElement} span */
  #place(span) {
    const at = span.getClientRects()[0] ?? span.getBoundingClientRect();
    const { offsetWidth: width, offsetHeight: height } = this.tip;
    const left = Math.min(Math.max(8, at.left), document.documentElement.clientWidth - width - 8);
    const below = at.bottom + 6;
    const top = below + height < window.innerHeight - 8 ? below : Math.max(8, at.top - height - 6);
    this.tip.style.left = `${left}px`;
    this.tip.style.top = `${top}px`;
  }

  /**
   * One token of an answer is in the tab order; the arrow keys go to the others.
   * @param {KeyboardEvent} event
   * @param {HTMLElement | null} span
   */
  #move(event, span) {
    if (!span) return;
    const others = span.parentElement?.children ?? [];
    const index = Number(span.dataset.index);
    const places = { ArrowRight: index + 1, ArrowLeft: index - 1, Home: 0, End: others.length - 1 };
    const target = /** @type {HTMLElement | undefined} */ (others[places[/** @type {"Home"} */ (event.key)]]);
    if (!target) return;
    event.preventDefault();
    span.tabIndex = -1;
    target.tabIndex = 0;
    target.focus();
  }
}

/** @param {import("./answer.mjs").Scored} token */
function described(token) {
  const others = token.top_logprobs ?? [];
  const chosenIsThere = others.some((other) => other.token === token.token);
  const all = chosenIsThere ? others : [...others, token];
  const lines = all.map((other) => {
    const share = Math.exp(other.logprob);
    const bar = element("span", { class: "tip-bar" });
    bar.style.width = `${Math.round(share * 100)}%`;
    const isChosen = other.token === token.token;
    return element("li", { class: isChosen ? "chosen" : "" }, [
      element("code", { text: visible(other.token) }),
      element("span", { class: "tip-track", "aria-hidden": "true" }, [bar]),
      element("span", { class: "tip-share", text: percent(share) }),
    ]);
  });
  return element("ul", {}, lines);
}

/** @param {string} text */
function visible(text) {
  return text.replaceAll("\n", "↵").replaceAll("\t", "⇥").replaceAll(" ", "␣") || "(empty)";
}

/** @param {number} share */
function percent(share) {
  if (share > 0 && share < 0.0001) return "< 0.01 %";
  return `${(share * 100).toFixed(share < 0.01 ? 2 : 1)} %`;
}

/** @param {number} logprob */
function level(logprob) {
  const share = Math.exp(logprob);
  return Math.min(LEVELS - 1, Math.floor((1 - share) * LEVELS));
}
