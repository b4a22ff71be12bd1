import assert from "node:assert/strict";
import { test } from "node:test";

import { readBlocks } from "../../../web/markdown/blocks.mjs";
import { readInline } from "../../../web/markdown/inline.mjs";

const blocks = (text) => readBlocks(text).blocks;
const paragraph = (...children) => ({ kind: "paragraph", children });

test("plain text is a paragraph", () => {
  assert.deepEqual(blocks("one\ntwo\n\nthree"), [paragraph("one\ntwo"), paragraph("three")]);
});

test("headings and rules", () => {
  assert.deepEqual(blocks("# One #\ntext\n***\n####### seven"), [
    { kind: "heading", level: 1, children: ["One"] },
    paragraph("text\n***\n####### seven"),
  ]);
  assert.deepEqual(blocks("text\n\n---"), [paragraph("text"), { kind: "rule" }]);
});

test("code keeps its text as it is, also while it is open", () => {
  const open = { kind: "code", language: "py", text: "a = **1**\n\n# x", open: true };
  assert.deepEqual(blocks("```py\na = **1**\n\n# x"), [open]);
  assert.deepEqual(blocks("```py\na = **1**\n\n# x\n```\nend"), [
    { ...open, open: false },
    paragraph("end"),
  ]);
  assert.deepEqual(blocks("~~~\n```\n~~~"), [{ kind: "code", language: "", text: "```", open: false }]);
});

test("lists have items, and lists in items", () => {
  assert.deepEqual(blocks("3. a\n   - b\n4. c\nlazy\n\nend"), [
    {
      kind: "list",
      ordered: true,
      start: 3,
      items: [
        [paragraph("a"), { kind: "list", ordered: false, start: 1, items: [[paragraph("b")]] }],
        [paragraph("c\nlazy")],
      ],
    },
    paragraph("end"),
  ]);
});

test("items may stand apart, and another kind of mark begins another list", () => {
  const [first, second] = blocks("- a\n\n- b\n\n1. c");
  assert.equal(first.items.length, 2);
  assert.equal(second.ordered, true);
});

test("quotes", () => {
  assert.deepEqual(blocks("> a\n> b\n\nc"), [
    { kind: "quote", blocks: [paragraph("a\nb")] },
    paragraph("c"),
  ]);
});

test("emphasis and code inside text", () => {
  assert.deepEqual(readInline("a **b *c*** `d **e**` _f_ \\*g\\*"), [
    "a ",
    { kind: "strong", children: ["b ", { kind: "em", children: ["c"] }] },
    " ",
    { kind: "code", children: ["d **e**"] },
    " ",
    { kind: "em", children: ["f"] },
    " *g*",
  ]);
});

for (const text of ["2 * 3 * 4", "snake_case_name", "**open", "`open", "a ** b ** c", "[x](javascript:1)", "<b>x</b>"]) {
  test(`${text} stays text`, () => assert.deepEqual(readInline(text).join(""), text));
}

test("what comes before the open block does not change when text is added", () => {
  const text = "# A\n\npara *x*\nmore\n\n- a\n- b\n\n  c\n\n> q\n\n```js\n1\n\n2\n```\n\n1. x\n2. y\n\nend **b**";
  const whole = blocks(text);
  let from = 0;
  const done = [];
  for (let end = 1; end <= text.length; end += 1) {
    const read = readBlocks(text.slice(from, end));
    done.push(...read.blocks.slice(0, read.numClosed));
    from += read.open;
  }
  done.push(...blocks(text.slice(from)));
  assert.deepEqual(done, whole);
});

for (const text of [">".repeat(5000), "- ".repeat(5000), "*".repeat(20000), "`".repeat(20001) + "a", "**a ".repeat(5000), "_a ".repeat(5000)]) {
  test(`${text.slice(0, 8)}… ${text.length} long, is read`, () => assert.equal(blocks(text).length, 1));
}
