// Server-sent events out of bytes, as the HTML standard says, wherever the chunks are cut.
// It knows nothing of what the events hold.

/** @typedef {{type: string, data: string}} SseEvent */

const MAX_EVENT_CHARACTERS = 16 * 1024 * 1024; // more is no answer but a fault

export class SseParser {
  #decoder = new TextDecoder("utf-8"); // drops a byte order mark, keeps half a character
  #rest = ""; // a line that has not ended
  #skipLineFeed = false; // the last chunk ended in CR; a LF that follows belongs to it
  /** @type {string[]} */
  #data = [];
  #size = 0;
  #type = "";

  /**
   * Take bytes as they came and return the events that they complete.
   * @param {Uint8Array} bytes
   * @returns {SseEvent[]}
   */
  push(bytes) {
    let text = this.#decoder.decode(bytes, { stream: true });
    if (this.#skipLineFeed && text) {
      if (text[0] === "\n") text = text.slice(1);
      this.#skipLineFeed = false;
    }
    if (!text) return [];
    const events = [];
    const lines = (this.#rest + text).split(/\r\n|\r|\n/);
    this.#skipLineFeed = text.endsWith("\r");
    this.#rest = lines.pop() ?? "";
    for (const line of lines) {
      const event = this.#line(line);
      if (event) events.push(event);
    }
    if (this.#size + this.#rest.length > MAX_EVENT_CHARACTERS) {
      throw new Error("an event of the stream is too large");
    }
    return events;
  }

  /**
   * @param {string} line
   * @returns {SseEvent | null}
   */
  #line(line) {
    if (line === "") {
      const event = this.#data.length
        ? { type: this.#type || "message", data: this.#data.join("\n") }
        : null;
      this.#data = [];
      this.#size = 0;
      this.#type = "";
      return event;
    }
    const colon = line.indexOf(":");
    if (colon === 0) return null; // a comment, which keeps connections open
    const field = colon < 0 ? line : line.slice(0, colon);
    let value = colon < 0 ? "" : line.slice(colon + 1);
    if (value.startsWith(" ")) value = value.slice(1);
    if (field === "data") {
      this.#data.push(value);
      this.#size += value.length;
    } else if (field === "event") {
      this.#type = value;
    }
    return null;
  }
}
