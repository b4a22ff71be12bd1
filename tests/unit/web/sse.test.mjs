import assert from "node:assert/strict";
import { test } from "node:test";

import { SseParser } from "../../../web/sse.mjs";

const bytes = (text) => new TextEncoder().encode(text);
const data = (events) => events.map((event) => event.data);

test("an event ends with an empty line", () => {
  const parser = new SseParser();
  assert.deepEqual(parser.push(bytes("data: one\n")), []);
  assert.deepEqual(parser.push(bytes("\n")), [{ type: "message", data: "one" }]);
});

test("what comes out does not depend on where the bytes are cut", () => {
  const text = "\ufeffdata: grö\r\n\r\n: comment\rdata:🌊\rdata: 東京\r\revent: x\ndata\ndata:  y\n\n";
  const all = bytes(text);
  const whole = new SseParser().push(all);
  assert.deepEqual(whole, [
    { type: "message", data: "grö" },
    { type: "message", data: "🌊\n東京" },
    { type: "x", data: "\n y" },
  ]);
  for (let first = 0; first <= all.length; first += 1) {
    for (let second = first; second <= all.length; second += 1) {
      const parser = new SseParser();
      const cut = [all.slice(0, first), all.slice(first, second), all.slice(second)];
      assert.deepEqual(cut.flatMap((part) => parser.push(part)), whole, `cut at ${first}, ${second}`);
    }
  }
});

test("byte by byte is the same", () => {
  const parser = new SseParser();
  const events = [...bytes("data: a\r\n\r\ndata: ü\r\n\r\n")].flatMap((byte) => parser.push(Uint8Array.of(byte)));
  assert.deepEqual(data(events), ["a", "ü"]);
});

test("an event without its empty line is none", () => {
  assert.deepEqual(new SseParser().push(bytes("data: half\n")), []);
});

test("events without data, ids and unknown fields are passed over", () => {
  const parser = new SseParser();
  assert.deepEqual(parser.push(bytes("event: ping\n\nid: 1\nretry: 5\nother: x\n\n")), []);
  assert.deepEqual(parser.push(bytes("data: after\n\n")), [{ type: "message", data: "after" }]);
});

test("an event that never ends is refused", () => {
  const parser = new SseParser();
  const much = bytes("data: " + "x".repeat(1 << 20));
  assert.throws(() => {
    for (let count = 0; count < 20; count += 1) parser.push(much);
  }, /too large/);
});
