// The requests that the page makes: models, answers as streams, the server's timeline.

import { problemOf } from "./answer.mjs";
import { SseParser } from "./sse.mjs";

const KEY = "slipstream.key";
const TITLES = new Map([
  [400, "The server refused the request"],
  [401, "The server wants an API key"],
  [404, "Not found"],
  [413, "The request is too large"],
  [429, "Too many requests"],
  [500, "The server failed"],
  [503, "The server is not available"],
]);

/** A request that was refused, or whose answer did not come whole. */
export class ApiProblem extends Error {
  /** @param {number} status @param {import("./answer.mjs").Problem} problem */
  constructor(status, problem) {
    super(problem.message);
    this.status = status;
    this.problem = problem;
  }
}

/** @param {string} key */
export function setKey(key) {
  try {
    sessionStorage.setItem(KEY, key);
  } catch {
    memoryKey = key;
  }
}

let memoryKey = "";

/** @returns {Record<string, string>} */
function authorization() {
  let key = memoryKey;
  try {
    key = sessionStorage.getItem(KEY) ?? key;
  } catch {
    // Storage is off: the key lives as long as the page.
  }
  return key ? { Authorization: `Bearer ${key}` } : {};
}

/** @typedef {{id: string, max_model_len?: number, sampling_defaults?: Record<string, number>}} ModelCard */

/** @returns {Promise<ModelCard[]>} */
export async function fetchModels() {
  const response = await request("/v1/models", {});
  const body = await response.json();
  return Array.isArray(body?.data) ? body.data.filter((/** @type {any} */ card) => typeof card?.id === "string") : [];
}

/**
 * What the server's processes did in the last seconds; `receivedAt` and `unixS` tie the clocks.
 * @param {number} seconds
 */
export async function fetchTimeline(seconds) {
  performance.clearResourceTimings();
  const response = await request(`/timeline?seconds=${seconds.toFixed(3)}`, {});
  const readAt = performance.now();
  const unixS = Number(response.headers.get("X-Unix-Time") ?? NaN);
  if (!Number.isFinite(unixS)) throw new Error("the server does not tell its time");
  const bytes = new Uint8Array(await response.arrayBuffer());
  // When the header came, not when this script, which may have been busy, got to read it.
  const entries = /** @type {PerformanceResourceTiming[]} */ (performance.getEntriesByType("resource"));
  const timing = entries.findLast((entry) => entry.name.includes("/timeline?"));
  return { bytes, receivedAt: timing?.responseStart || readAt, unixS };
}

/**
 * Ask for an answer and yield its events, parsed. Returns after `[DONE]`; a stream that ends
 * without it throws.
 * @param {object} body
 * @param {AbortSignal} signal
 * @param {() => void} onHeaders
 * @returns {AsyncGenerator<any[], void, void>}
 */
export async function* streamChat(body, signal, onHeaders) {
  const response = await request("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  onHeaders();
  const reader = /** @type {ReadableStream<Uint8Array>} */ (response.body).getReader();
  const parser = new SseParser();
  try {
    for (;;) {
      const { done, value } = await read(reader, signal);
      if (done) break;
      const events = parser.push(value);
      const end = events.findIndex((event) => event.data === "[DONE]");
      const chunks = (end < 0 ? events : events.slice(0, end)).map((event) => parse(event.data));
      if (chunks.length) yield chunks;
      if (end >= 0) return;
    }
  } finally {
    reader.cancel().catch(() => {}); // what comes after the end is nobody's
  }
  throw new ApiProblem(0, {
    title: "The answer broke off",
    message: "The connection was closed before the answer was complete.",
  });
}

/** @param {ReadableStreamDefaultReader<Uint8Array>} reader @param {AbortSignal} signal */
async function read(reader, signal) {
  try {
    return await reader.read();
  } catch (error) {
    if (signal.aborted) throw error;
    throw new ApiProblem(0, {
      title: "The connection was lost",
      message: "The server or the network went away while it answered.",
    });
  }
}

/** @param {string} data */
function parse(data) {
  try {
    return JSON.parse(data);
  } catch {
    throw new ApiProblem(0, {
      title: "The answer broke off",
      message: "The server sent something that is not JSON.",
    });
  }
}

/** @param {string} path @param {RequestInit} init */
async function request(path, init) {
  let response;
  try {
    response = await fetch(path, {
      ...init,
      headers: { ...init.headers, ...authorization() },
      credentials: "same-origin",
      cache: "no-store",
    });
  } catch (error) {
    if (init.signal?.aborted) throw error;
    throw new ApiProblem(0, {
      title: "The server cannot be reached",
      message: "Check that it runs and that there is a connection.",
    });
  }
  if (response.ok) return response;
  const title = TITLES.get(response.status) ?? `The server answered with status ${response.status}`;
  const problem = problemOf(await response.json().catch(() => null), title);
  const wait = Number(response.headers.get("Retry-After") ?? NaN);
  problem.retryAfterS = Number.isFinite(wait) && wait > 0 ? wait : null;
  throw new ApiProblem(response.status, problem);
}
