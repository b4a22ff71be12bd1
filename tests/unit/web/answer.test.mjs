import assert from "node:assert/strict";
import { test } from "node:test";

import { Answer, problemOf, splitByTokens } from "../../../web/answer.mjs";
import { Settings } from "../../../web/settings.mjs";
import { figuresOf, formatMs } from "../../../web/stages.mjs";

const chunk = (delta, more = {}) => ({ choices: [{ index: 0, delta, ...more }] });
const scored = (text) => ({ token: text, logprob: -1, bytes: [...new TextEncoder().encode(text)] });

function streamed() {
  const answer = new Answer("m", 1000);
  answer.take(chunk({ role: "assistant", content: "" }), 1040);
  answer.take(chunk({ reasoning: "hm", reasoning_content: "hm" }), 1050);
  answer.take(chunk({ content: "Hel" }), 1100);
  answer.take(chunk({ content: "lo" }), 1250);
  answer.take(chunk({}, { finish_reason: "stop" }), 1260);
  const usage = { prompt_tokens: 9, completion_tokens: 5, prompt_tokens_details: { cached_tokens: 8 } };
  answer.take({ choices: [], usage }, 1260);
  return answer;
}

test("an answer is folded from its chunks, and its times are those of its text", () => {
  const answer = streamed();
  assert.equal(answer.content, "Hello");
  assert.equal(answer.reasoning, "hm");
  assert.equal(answer.finish, "stop");
  assert.deepEqual(answer.usage, { prompt: 9, cached: 8, completion: 5, reasoning: null });
  assert.deepEqual([answer.times.first, answer.times.reasoned, answer.times.last], [50, 100, 250]);
  assert.equal(figuresOf(answer).tokensPerS, 20);
});

test("where all tokens came at once no speed is claimed", () => {
  const answer = new Answer("m", 0);
  answer.take(chunk({ content: "all" }), 10);
  answer.take({ choices: [], usage: { completion_tokens: 3 } }, 10);
  assert.equal(figuresOf(answer).tokensPerS, null);
});

test("calls are put together by their index", () => {
  const answer = new Answer("m", 0);
  const part = (index, call) => answer.take(chunk({ tool_calls: [{ index, ...call }] }), 1);
  part(0, { id: "a", function: { name: "one", arguments: "" } });
  part(0, { function: { arguments: '{"x"' } });
  part(1, { id: "b", function: { name: "two", arguments: "{}" } });
  part(0, { function: { arguments: ":1}" } });
  part(-1, { id: "c" });
  part(1e9, { id: "c" });
  assert.deepEqual(answer.calls, [
    { id: "a", name: "one", arguments: '{"x":1}' },
    { id: "b", name: "two", arguments: "{}" },
  ]);
});

for (const odd of [null, 3, "x", [], {}, { choices: null }, { choices: [null] }, { choices: [{}] }, { choices: [{ delta: { content: 5, tool_calls: 7 } }] }]) {
  test(`the odd event ${JSON.stringify(odd)} is passed over`, () => {
    const answer = new Answer("m", 0);
    answer.take(odd, 1);
    assert.equal(answer.content + answer.reasoning, "");
    assert.equal(answer.problem, null);
  });
}

test("an error says what it has", () => {
  assert.equal(problemOf({ error: "plain" }, "T").message, "plain");
  assert.equal(problemOf(null, "T").message, "The server did not say why.");
  assert.equal(problemOf({ error: { message: "m", param: "p", code: 5 } }, "T").param, "p");
});

test("text is cut at its tokens' ends, as far as they agree", () => {
  const texts = ({ pieces, rest }) => [...pieces.map((piece) => piece.text), rest.length];
  assert.deepEqual(texts(splitByTokens("ab", [scored("a"), scored("b")])), ["a", "b", 0]);
  assert.deepEqual(texts(splitByTokens("a", [scored("a"), scored("</s>")])), ["a", 1]);
  assert.deepEqual(texts(splitByTokens("ab", [scored("a"), scored("<x>"), scored("b")])), ["a", "b", 0]);
  assert.deepEqual(texts(splitByTokens("a?c", [scored("a"), scored("b"), scored("c")])), ["a", "?c", 0]);
  const [first, ...rest] = new TextEncoder().encode("ü");
  const halves = [{ token: "?", logprob: 0, bytes: [first] }, { token: "?", logprob: 0, bytes: rest }];
  assert.deepEqual(splitByTokens("ü", halves), { pieces: [{ text: "ü", tokens: halves }], rest: [] });
});

test("tokens that end the reasoning are none of the text after it", () => {
  const answer = new Answer("m", 0);
  const take = (delta, ...tokens) => answer.take(chunk(delta, { logprobs: { content: tokens.map(scored) } }), 1);
  take({ reasoning: "hm" }, "hm");
  take({ content: "" }, "</think>");
  take({ content: "" }, "\n\n");
  take({ content: "Yes" }, "Yes");
  take({ content: "!" }, "!");
  assert.deepEqual(answer.pieces.map(({ text, tokens }) => [text, tokens.map(({ token }) => token)]), [["Yes", ["Yes"]], ["!", ["!"]]]);
});

test("tokens of the text that come with the end of the reasoning are kept for it", () => {
  const answer = new Answer("m", 0);
  const tokens = ["h", "m", "</think>", "\n\n", "4", "2"].map(scored);
  answer.take(chunk({ reasoning: "hm" }, { logprobs: { content: tokens } }), 1);
  answer.take(chunk({ content: "42" }), 2);
  const pieces = answer.pieces.map(({ text, tokens }) => [text, tokens.map(({ token }) => token)]);
  assert.deepEqual(pieces, [
    ["4", ["4"]],
    ["2", ["2"]],
  ]);
});

test("reasoning is asked for only where it was chosen, and only as the form has it", () => {
  const settings = new Settings();
  const effort = (chosen) => {
    settings.values = { reasoning: chosen };
    return settings.fields().reasoning_effort;
  };
  assert.deepEqual(["on", "off", "", "much"].map(effort), ["medium", "none", undefined, undefined]);
});

test("times are written with their units", () => {
  const found = [0.01, 0.5, 12.3, 999.6, 1234, 12345, 65000].map(formatMs);
  assert.deepEqual(found, ["10 µs", "0.5 ms", "12 ms", "1.00 s", "1.23 s", "12.3 s", "1 min 5 s"]);
});

test("an answer that goes on keeps its text, and its numbers begin anew", () => {
  const answer = new Answer("m", 0);
  answer.take(chunk({ content: "One two " }), 10);
  answer.state = "stopped";
  assert.equal(answer.canContinue, true);
  answer.resume(1000);
  answer.take(chunk({ content: " three" }, { logprobs: { content: [scored(" three")] } }), 1050);
  assert.equal(answer.content, "One two three");
  assert.deepEqual([answer.times.first, answer.numDeltas], [50, 1]);
  assert.deepEqual(answer.pieces.map(({ text }) => text), ["One two", " three"]);
});

for (const [state, finish, content, can] of [
  ["stopped", "", "x", true], ["failed", "", "x", true], ["interrupted", "", "x", true], ["done", "length", "x", true],
  ["done", "stop", "x", false], ["stopped", "", " ", false], ["failed", "", "", false],
]) {
  test(`an answer that is ${state} by ${finish || "nothing"} with ${JSON.stringify(content)} ${can ? "can" : "cannot"} be continued`, () => {
    assert.equal(Object.assign(new Answer("m", 0), { state, finish, content }).canContinue, can);
  });
}
