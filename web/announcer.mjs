// Reads answers to those who do not see them: whole sentences, not tokens, and not all too often.

import { element } from "./element.mjs";

const EVERY_MS = 1500;
const MAX_LINES = 20; // kept in the live region
const MAX_CHARACTERS = 2000; // at once
const ENDINGS = new Map([["done", "Answer complete."], ["stopped", "Stopped."]]);

export class Announcer {
  #said = 0;
  #saidAt = 0;

  /** @param {HTMLElement} region */
  constructor(region) {
    this.region = region;
  }

  /** @param {import("./answer.mjs").Answer} answer what it has already was said before */
  begin(answer) {
    this.#said = answer.content.length;
    this.#saidAt = performance.now();
    this.say("Answering.");
  }

  /** @param {import("./answer.mjs").Answer} answer */
  more(answer) {
    const now = performance.now();
    if (now - this.#saidAt < EVERY_MS) return;
    const rest = answer.content.slice(this.#said);
    const end = Math.max(...[". ", "! ", "? ", "\n", "。"].map((mark) => rest.lastIndexOf(mark)));
    if (end < 0) return;
    this.#saidAt = now;
    this.#said += end + 1;
    this.say(rest.slice(0, end + 1));
  }

  /** @param {import("./answer.mjs").Answer} answer */
  end(answer) {
    this.say(answer.content.slice(this.#said));
    this.#said = answer.content.length;
    this.say(ENDINGS.get(answer.state) ?? ""); // what went wrong is an alert of its own
  }

  /** @param {string} text */
  say(text) {
    const plain = spoken(text).trim().slice(0, MAX_CHARACTERS);
    if (!plain) return;
    this.region.append(element("p", { text: plain }));
    while (this.region.children.length > MAX_LINES) this.region.firstElementChild?.remove();
  }
}

/** A text without Markdown's marks, which would be read out one by one. @param {string} text */
function spoken(text) {
  return text
    .replaceAll(/^\s*(?:```|~~~).*$/gm, "")
    .replaceAll(/^[|\s:-]+$/gm, "")
    .replaceAll(/^\s*(?:#+|>|[*+-]) /gm, "")
    .replaceAll(/!?\[([^\]]*)\]\([^)\s]*\)/g, "$1")
    .replaceAll(/\*+|`+|\$+|~~|\|/g, " ")
    .replaceAll(/ {2,}/g, " ");
}
