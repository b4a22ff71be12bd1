// The line under an answer: how fast it was, a bar of its stages, and on demand the server's lanes.

import { fetchTimeline } from "./api.mjs";
import { element } from "./element.mjs";
import { figuresOf, formatMs, formatRate, plural } from "./stages.mjs";
import { joined, readTimeline } from "./timeline.mjs";

const MARGIN_S = 0.25; // what the server did before and after, on clocks that are read a little apart
const MAX_SECONDS = 600; // what /timeline gives at most
const SVG = "http://www.w3.org/2000/svg";
const WIDTH = 1000;
const WHAT = new Map([
  ["tokenizer", "prompt to tokens"],
  ["compute device", "the device's steps"],
  ["compute host", "planning and launching steps"],
  ["detokenizer", "tokens to text"],
  ["router", "text to this page"],
]);
const SWATCHES = new Map([
  ["Until the first token", "swatch swatch-wait"],
  ["Reasoning", "swatch swatch-reason"],
  ["Generation", "swatch swatch-make"],
  ["Generation after it", "swatch swatch-make"],
]);

export class StagesView {
  /** @type {HTMLElement | null} */
  #lanes = null;
  #isEnded = false;
  #isAskedFor = false; // opened by hand, not by the setting

  /**
   * @param {import("./answer.mjs").Answer} answer
   * @param {boolean} isOpen
   */
  constructor(answer, isOpen) {
    this.answer = answer;
    this.figures = element("span", { class: "figures" });
    this.bar = element("span", { class: "stage-bar", "aria-hidden": "true" });
    this.wait = this.bar.appendChild(element("span", { class: "stage-wait" }));
    this.reason = this.bar.appendChild(element("span", { class: "stage-reason" }));
    this.make = this.bar.appendChild(element("span", { class: "stage-make" }));
    this.body = element("div", { class: "stages-body" });
    const summary = element("summary", { "aria-label": "Stages of this answer" }, [
      element("span", { class: "summary" }, [this.bar, this.figures]),
    ]);
    this.root = /** @type {HTMLDetailsElement} */ (
      element("details", { class: "stages", open: isOpen }, [summary, this.body])
    );
    summary.addEventListener("click", () => (this.#isAskedFor = true));
    this.root.addEventListener("toggle", () => this.#fill());
  }

  /** Show the figures as they are now. */
  update() {
    const { answer } = this;
    const found = figuresOf(answer);
    const words = [];
    if (found.firstMs !== null) words.push(`TTFT ${formatMs(found.firstMs)}`);
    if (found.tokensPerS !== null) words.push(`${found.exact ? "" : "≈ "}${formatRate(found.tokensPerS)} tokens/s`);
    if (found.numTokens) words.push(`${found.exact ? "" : "≈ "}${plural(found.numTokens, "token")}`);
    if (found.totalMs !== null && answer.state !== "streaming") words.push(formatMs(found.totalMs));
    const shown = words.join(" · ") || (answer.state === "streaming" ? "Waiting for the first token…" : "No token came");
    this.figures.textContent = shown.replaceAll(/(?<!·) (?!·)/g, "\u00a0"); // breaks at the dots only
    this.root.firstElementChild?.setAttribute("aria-label", `Stages of this answer: ${shown}`);
    const first = found.firstMs ?? 0;
    const reasoned = answer.reasoning ? (answer.times.reasoned ?? answer.times.last ?? first) : first;
    this.wait.style.flexGrow = String(first);
    this.reason.style.flexGrow = String(reasoned - first);
    this.make.style.flexGrow = String(Math.max(0, (answer.times.last ?? first) - reasoned));
  }

  /** The answer is complete: its stages can be shown. */
  end() {
    this.#isEnded = true;
    this.update();
    this.#fill();
  }

  #fill() {
    if (!this.root.open) return;
    if (!this.#isEnded) {
      this.body.replaceChildren(element("p", { class: "hint", text: "The stages are shown when the answer is complete." }));
      return;
    }
    if (this.#lanes) return;
    this.#lanes = element("div", { class: "lanes" });
    this.body.replaceChildren(table(rows(this.answer)), this.#lanes);
    if (Number.isNaN(this.answer.sentAt)) return; // of an earlier page: its clock is gone
    void this.#fetch(this.#lanes).then(() => {
      if (this.#isAskedFor) this.root.scrollIntoView({ block: "nearest" });
    });
  }

  /** @param {HTMLElement} host */
  async #fetch(host) {
    const begin = this.answer.sentAt;
    const end = begin + (this.answer.times.end ?? 0);
    const seconds = (performance.now() - begin) / 1000 + MARGIN_S;
    if (seconds > MAX_SECONDS) {
      host.append(element("p", { class: "hint", text: "The server's own record of this time is gone." }));
      return;
    }
    try {
      const lanes = readTimeline(await fetchTimeline(seconds), begin, end);
      host.append(...drawn(lanes, this.answer, end - begin));
    } catch (error) {
      const why = error instanceof Error ? error.message : String(error);
      host.append(element("p", { class: "hint", text: `The server's record of its stages is not to be had: ${why}` }));
    }
  }
}

/** @param {import("./answer.mjs").Answer} answer @returns {[string, string][]} */
function rows(answer) {
  const found = figuresOf(answer);
  const { usage, times, finish } = answer;
  const reasonedMs = answer.reasoning && times.first !== null ? (times.reasoned ?? times.last ?? 0) - times.first : null;
  /** @type {[string, string | null][]} */
  const all = [
    ["Until the first token", ms(found.firstMs)],
    ["Header of the answer", ms(times.headers)],
    ["Reasoning", ms(reasonedMs)],
    [reasonedMs === null ? "Generation" : "Generation after it", ms(found.generationMs === null ? null : found.generationMs - (reasonedMs ?? 0))],
    ["In all", ms(found.totalMs)],
    ["Prompt", usage ? `${plural(usage.prompt, "token")}${usage.cached ? `, ${usage.cached} of them cached` : ""}` : null],
    ["Answer", `${plural(found.numTokens, found.exact ? "token" : "event")}${usage?.reasoning ? `, ${usage.reasoning} of them reasoning` : ""}`],
    ["Speed", found.tokensPerS === null ? null : `${formatRate(found.tokensPerS)} tokens/s after the first`],
    ["Continued", answer.isContinued ? "the numbers are those of the last part" : null],
    ["Ended by", finish || answer.state],
    ["Model", answer.model || null],
  ];
  return /** @type {[string, string][]} */ (all.filter(([, value]) => value !== null));
}

/** @param {[string, string][]} found */
function table(found) {
  const entries = found.flatMap(([name, value]) => [
    element("dt", { class: SWATCHES.get(name) ?? null, text: name }),
    element("dd", { text: value }),
  ]);
  return element("dl", { class: "numbers" }, entries);
}

/**
 * @param {import("./timeline.mjs").Lane[]} lanes
 * @param {import("./answer.mjs").Answer} answer
 * @param {number} lengthMs
 * @returns {HTMLElement[]}
 */
function drawn(lanes, answer, lengthMs) {
  if (!lanes.length) return [element("p", { class: "hint", text: "The server has no record of this time." })];
  const first = answer.times.first === null ? NaN : answer.times.first / lengthMs;
  const lines = lanes.map((lane) =>
    element("div", { class: "lane" }, [
      element("div", { class: "lane-head" }, [
        element("span", { class: "lane-name", text: lane.label }),
        element("span", { class: "hint", text: WHAT.get(lane.label) ?? "" }),
      ]),
      laneDrawing(lane, first),
      element("div", { class: "hint" }, countsOf(lane)),
    ]),
  );
  return [
    element("p", { class: "hint", text: "What the server did meanwhile, for this and all other requests; the line is the first token's arrival here." }),
    ...lines,
  ];
}

/** @param {import("./timeline.mjs").Lane} lane @returns {(Node | string)[]} */
function countsOf({ counts }) {
  return counts.flatMap(({ name, count, ms: sum }, index) => [
    index ? " · " : "",
    element("span", { class: "nowrap", text: `${name} ${count} × ${formatMs(sum / count)}` }),
  ]);
}

/** @param {import("./timeline.mjs").Lane} lane @param {number} first */
function laneDrawing(lane, first) {
  const svg = document.createElementNS(SVG, "svg");
  svg.setAttribute("viewBox", `0 0 ${WIDTH} 10`);
  svg.setAttribute("preserveAspectRatio", "none");
  svg.setAttribute("class", `lane-drawing service-${lane.service}`);
  svg.setAttribute("aria-hidden", "true");
  for (const { name } of lane.counts) {
    const runs = joined(lane.runs.filter((run) => run.name === name), 0.5 / WIDTH);
    const path = document.createElementNS(SVG, "path");
    path.setAttribute("class", `run-${name}`);
    path.setAttribute("d", runs.map((run) => rectangle(run.from * WIDTH, run.to * WIDTH)).join(""));
    svg.append(path);
  }
  if (Number.isFinite(first)) {
    const line = document.createElementNS(SVG, "path");
    line.setAttribute("class", "lane-first");
    line.setAttribute("d", rectangle(first * WIDTH - 0.75, first * WIDTH + 0.75));
    svg.append(line);
  }
  return svg;
}

/** @param {number} from @param {number} to */
function rectangle(from, to) {
  const width = Math.max(to - from, 1); // what is shorter than a pixel is still to be seen
  return `M${from.toFixed(2)} 0h${width.toFixed(2)}v10h-${width.toFixed(2)}z`;
}

/** @param {number | null} value */
function ms(value) {
  return value === null ? null : formatMs(value);
}
