// What /timeline tells of the time of one answer: lanes of spans, on the page's clock.

import { unpack } from "./msgpack.mjs";

const SAME_HOST_S = 0.05; // clocks nearer than this are one clock, read a little apart
const STAGES = ["tokenizer", "compute", "detokenizer", "router"]; // in the order of the ring

/**
 * @typedef {{name: string, from: number, to: number}} Run from 0, the window's begin, to 1, its end
 * @typedef {{service: string, lane: string, label: string, runs: Run[],
 *            counts: {name: string, count: number, ms: number}[]}} Lane
 */

/**
 * Read a timeline and keep what lies between two moments of the page's clock, in milliseconds.
 * `receivedAt` is when the answer came, `unixS` the server's clock then.
 * @param {{bytes: Uint8Array, receivedAt: number, unixS: number}} timeline
 * @param {number} beginMs
 * @param {number} endMs
 * @returns {Lane[]}
 */
export function readTimeline({ bytes, receivedAt, unixS }, beginMs, endMs) {
  const [parts] = unpack(bytes);
  const lengthMs = Math.max(endMs - beginMs, 0.001);
  /** @type {Map<string, Lane>} */
  const lanes = new Map();
  const several = new Set();
  const seen = new Set();
  for (const [service] of parts) (seen.has(service) ? several : seen).add(service);
  for (const [service, name, ownUnixS, tracks] of parts) {
    const isSameHost = Math.abs(ownUnixS - parts[0][2]) < SAME_HOST_S;
    const offsetS = isSameHost ? parts[0][2] : ownUnixS;
    const toMs = (/** @type {number} */ atS) => receivedAt + (atS + offsetS - unixS) * 1000 - beginMs;
    for (const [laneName, trackName, began, ended, args] of tracks) {
      const label = `${several.has(service) ? name : service}${service === "compute" ? ` ${laneName}` : ""}`;
      const lane = lanes.get(label) ?? { service, lane: laneName, label, runs: [], counts: [] };
      lanes.set(label, lane);
      const prefill = column(args.find((/** @type {any} */ arg) => arg[0] === "prefill_tokens")?.[1]);
      take(lane, trackName, column(began).map(toMs), column(ended).map(toMs), prefill, lengthMs);
    }
  }
  return [...lanes.values()]
    .filter((lane) => lane.runs.length)
    .sort((one, other) => STAGES.indexOf(one.service) - STAGES.indexOf(other.service));
}

/**
 * @param {Lane} lane @param {string} name @param {Float64Array} beganMs @param {Float64Array} endedMs
 * @param {Float64Array} prefill @param {number} lengthMs
 */
function take(lane, name, beganMs, endedMs, prefill, lengthMs) {
  beganMs.forEach((began, index) => {
    const ended = endedMs[index];
    if (!(began <= ended) || ended < 0 || began > lengthMs) return; // NaN: a span that is not known
    const isStep = name === "step";
    const shown = isStep ? (prefill[index] > 0 ? "prefill" : "decode") : name;
    const count = lane.counts.find((each) => each.name === shown);
    if (count) {
      count.count += 1;
      count.ms += ended - began;
    } else {
      lane.counts.push({ name: shown, count: 1, ms: ended - began });
    }
    const from = Math.max(0, began / lengthMs);
    lane.runs.push({ name: shown, from, to: Math.min(1, ended / lengthMs) });
  });
}

/**
 * Join runs of one name that are nearer than can be seen.
 * @param {Run[]} runs
 * @param {number} gap
 * @returns {Run[]}
 */
export function joined(runs, gap) {
  /** @type {Run[]} */
  const found = [];
  for (const run of [...runs].sort((one, other) => one.from - other.from)) {
    const last = found[found.length - 1];
    if (last && last.name === run.name && run.from - last.to < gap) last.to = Math.max(last.to, run.to);
    else found.push({ ...run });
  }
  return found;
}

/** @param {Uint8Array | undefined} bytes little-endian float64s @returns {Float64Array} */
function column(bytes) {
  if (!bytes) return new Float64Array(0);
  const view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  return Float64Array.from({ length: bytes.length >> 3 }, (_, index) => view.getFloat64(8 * index, true));
}
