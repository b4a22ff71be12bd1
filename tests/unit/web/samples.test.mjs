// What holds for every text, seen on the samples and all their beginnings.

import assert from "node:assert/strict";
import { readdirSync, readFileSync } from "node:fs";
import { test } from "node:test";

import { readBlocks } from "../../../web/markdown/blocks.mjs";
import { Highlighter } from "../../../web/markdown/highlight.mjs";
import { readTex } from "../../../web/markdown/tex.mjs";

const folder = new URL("./samples/", import.meta.url);
const samples = readdirSync(folder).map((name) => [name, readFileSync(new URL(name, folder), "utf8")]);

/** All strings of a tree, in their order. */
function textOf(tree) {
  if (typeof tree === "string") return tree;
  if (Array.isArray(tree)) return tree.map(textOf).join(" ");
  if (tree === null || typeof tree !== "object") return "";
  const { kind, align, start, ordered, open, language, address, ...rest } = tree;
  return [address ?? "", ...Object.values(rest).map(textOf)].join(" ");
}

const words = (text) => text.match(/[\p{L}\p{N}]+/gu) ?? [];

for (const [name, text] of samples) {
  test(`${name}: every beginning is read, and what is closed in it stays`, () => {
    let from = 0;
    const closed = [];
    for (let end = 1; end <= text.length; end += 1) {
      const read = readBlocks(text.slice(from, end), true);
      closed.push(...read.blocks.slice(0, read.numClosed));
      from += read.open;
    }
    assert.deepEqual([...closed, ...readBlocks(text.slice(from)).blocks], readBlocks(text).blocks);
  });

  test(`${name}: every word of it is shown, in whatever beginning`, () => {
    for (const end of [...Array(40).keys()].map((part) => Math.ceil((text.length * (part + 1)) / 40))) {
      const source = text.slice(0, end);
      const shown = new Set(words(textOf(readBlocks(source).blocks)));
      const missing = words(source).filter((word) => !shown.has(word));
      assert.deepEqual(missing.filter((word) => !LEFT_OUT.has(word)), [], `of the first ${end} characters`);
    }
  });
}

// Languages of code have a place of their own; numbers of lists are made by the browser; a link's
// title and the tag that breaks a cell's line are not shown.
const LEFT_OUT = new Set("python bash json ts sql c html diff yaml js 1 2 3 10 11 a title br x".split(" "));

const PIECES = ["a", "b c", " ", "\n", "\n\n", "*", "**", "_", "`", "\n```js\n", "\n```\n", "~~", "$", "\n$$\n", "\\(", "\\)", "\n\\[", "\\]",
  "|", "\n| a | b |\n|---|---|\n", "|-", "\n- ", "\n  ", "\n   ", "\n1. ", "\n> ", "\n# ", "[", "](", "http://x.y", ")", "!", "<br>", "\\",
  "\n---\n", "\\begin{align}", "\\end{align}", "\\frac", "{", "}", "^", "&", "\\\\", "\\left(", "\\right)"];

/** Numbers that are the same in every run. */
function* numbers(seed) {
  for (let state = seed; ; ) {
    state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
    yield (state >>> 8) / 2 ** 24;
  }
}

test("texts of marks in any order are read alike however they come", () => {
  const random = numbers(11);
  const below = (bound) => Math.floor(random.next().value * bound);
  for (let round = 0; round < 3000; round += 1) {
    const text = Array.from({ length: 1 + below(25) }, () => PIECES[below(PIECES.length)]).join("");
    let from = 0;
    const closed = [];
    for (let end = 1; end <= text.length; end += 1 + below(3)) {
      const read = readBlocks(text.slice(from, end), true);
      closed.push(...read.blocks.slice(0, read.numClosed));
      from += read.open;
    }
    assert.deepEqual([...closed, ...readBlocks(text.slice(from)).blocks], readBlocks(text).blocks, JSON.stringify(text));
    readTex(text);
  }
});

const FORMULAS = readFileSync(new URL("mathematics.md", folder), "utf8").match(/\\[a-z]+.*|\$.*\$/g) ?? [];
for (const formula of FORMULAS) {
  test(`every beginning of ${formula.slice(0, 40)} is a formula`, () => {
    for (let end = 0; end <= formula.length; end += 1) assert.equal(typeof readTex(formula.slice(0, end)).kind, "string");
  });
}

test("a formula's signs are kept: what is not known is its source", () => {
  assert.deepEqual(readTex("\\mystery{x}"), { kind: "row", children: [{ kind: "source", text: "\\mystery" }, { kind: "letter", text: "x" }] });
  assert.deepEqual(readTex("\\frac12"), { kind: "fraction", above: { kind: "number", text: "1" }, below: { kind: "number", text: "2" }, line: true });
  assert.deepEqual(readTex("\\mathbb{R}"), { kind: "upright", text: "ℝ" });
});

for (const text of ["{".repeat(9000), "\\frac".repeat(9000), "x^".repeat(9000), "x'_a".repeat(5000), "\\left(".repeat(9000), "\\begin{cases}".repeat(5000), "}".repeat(9000)]) {
  test(`the formula ${text.slice(0, 14)}… of ${text.length} characters is read`, () => {
    JSON.stringify(readTex(text));
  });
}

const CODE = [
  ["python", 'x = """a\nb""" + "c\\"d" # e', [["string", '"""a'], ["string", 'b"""'], ["string", '"c\\"d"'], ["comment", "# e"]]],
  ["js", "`a\n\\`b` // c", [["string", "`a"], ["string", "\\`b`"], ["comment", "// c"]]],
  ["json", '{"a": "b", "c": true}', [["property", '"a"'], ["string", '"b"'], ["property", '"c"'], ["constant", "true"]]],
  ["sh", "echo $HOME --all # x", [["keyword", "echo"], ["constant", "$HOME"], ["attribute", "--all"], ["comment", "# x"]]],
  ["sql", "SELECT 'it' -- x", [["keyword", "SELECT"], ["string", "'it'"], ["comment", "-- x"]]],
  ["c", "int x = f(0x1F); /* a\nb */", [["constant", "int"], ["function", "f"], ["number", "0x1F"], ["comment", "/* a"], ["comment", "b */"]]],
  ["html", '<a href="x">t</a>', [["tag", "<a"], ["attribute", "href"], ["string", '"x"'], ["tag", ">"], ["tag", "</a"], ["tag", ">"]]],
  ["diff", "-a\n+b\n c", [["removed", "-a"], ["added", "+b"]]],
  ["unheard-of", "if x", []],
];
for (const [language, code, coloured] of CODE) {
  test(`${language}: what is coloured`, () => {
    const highlighter = new Highlighter(language);
    const tokens = code.split("\n").flatMap((line) => highlighter.line(line));
    assert.deepEqual(tokens.filter(([kind]) => kind), coloured);
  });
}

for (const language of "python js json sh sql c html css yaml diff".split(" ")) {
  test(`${language}: coloured or not, no character is lost`, () => {
    for (const [, text] of samples) {
      const highlighter = new Highlighter(language);
      for (const line of text.split("\n")) {
        assert.equal(highlighter.line(line).map(([, part]) => part).join(""), line);
      }
    }
  });
}
