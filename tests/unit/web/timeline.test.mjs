import assert from "node:assert/strict";
import { test } from "node:test";

import { unpack } from "../../../web/msgpack.mjs";
import { joined, readTimeline } from "../../../web/timeline.mjs";

const hex = (text) => Uint8Array.from(text.match(/../g) ?? [], (byte) => parseInt(byte, 16));

test("values of every kind are read", () => {
  const all = "9d 01 ff c0 c2 c3 a178 c40107 cb3ff8000000000000 cd0102 d1ff00 81a16101 cf0000000100000000 d93161".replaceAll(" ", "");
  assert.throws(() => unpack(hex(all)), /ends too early/);
  const found = unpack(hex(all.slice(0, -6) + "d90161"));
  assert.deepEqual(found.slice(0, 6), [1, -1, null, false, true, "x"]);
  assert.deepEqual([...found[6]], [7]);
  assert.deepEqual(found.slice(7), [1.5, 258, -256, { a: 1 }, 4294967296, "a"]);
});

for (const bad of ["", "c1", "93", "dc", "ddffffffff", "91".repeat(100) + "01"]) {
  test(`the bytes ${bad.slice(0, 12)} are refused`, () => assert.throws(() => unpack(hex(bad)), Error));
}

test("a timeline that the server packed is put on the page's clock", () => {
  // What `test_scripts.py` packs: two processes of one host, clocks 10 s behind Unix time.
  const bytes = hex(process.env.SLIPSTREAM_TIMELINE ?? "");
  const lanes = readTimeline({ bytes, receivedAt: 5000, unixS: 15 }, 4000, 5000);
  assert.deepEqual(
    lanes.map(({ label, counts }) => [label, counts]),
    [
      ["tokenizer", [{ name: "tokenize", count: 1, ms: 125 }]],
      ["compute device", [
        { name: "prefill", count: 1, ms: 250 },
        { name: "decode", count: 1, ms: 125 },
      ]],
    ],
  );
  const [prefill, decode] = lanes[1].runs;
  assert.deepEqual([prefill.from, prefill.to, decode.from, decode.to], [0.25, 0.5, 0.5, 0.625]);
});

test("runs nearer than can be seen are joined", () => {
  const run = (from, to, name = "a") => ({ name, from, to });
  assert.deepEqual(joined([run(0.2, 0.3), run(0, 0.1), run(0.3001, 0.4)], 0.001), [run(0, 0.1), run(0.2, 0.4)]);
});
