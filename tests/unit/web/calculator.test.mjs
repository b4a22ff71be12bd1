import assert from "node:assert/strict";
import { test } from "node:test";

import { calculate, formatNumber } from "../../../web/calculator.mjs";
import { runTool, TOOLS } from "../../../web/tools.mjs";

const GOOD = [
  ["1 + 2 * 3", 7],
  ["(1 + 2) * 3", 9],
  ["2 - 3 - 4", -5],
  ["100 / 8 / 5", 2.5],
  ["2 ^ 3 ^ 2", 512],
  ["2 ** 10", 1024],
  ["-2 ^ 2", -4],
  ["2 ^ -1", 0.5],
  ["7 % 4", 3],
  ["--3", 3],
  ["1.5e3 + .5", 1500.5],
  ["3 × 4 ÷ 2 − 1", 5],
  ["sqrt(16) + max(1, 2, 3)", 7],
  ["PI * 0", 0],
];
const BAD = [
  ["", /ends too early/],
  ["1 +", /ends too early/],
  ["1 2", /did not expect/],
  ["(1", /expected "\)"/],
  ["1 / 0", /division by zero/],
  ["1 % 0", /division by zero/],
  ["alert(1)", /there is no "alert"/],
  ["constructor", /there is no "constructor"/],
  ["__proto__", /did not understand/],
  ["this['x']", /did not understand/],
  ["1; 2", /did not understand/],
  ["9 ^ 9 ^ 9", /not a finite number/],
  ["sqrt(0 - 1)", /not a finite number/],
  ["(".repeat(500) + "1", /too deeply/],
  ["-".repeat(500) + "1", /too deeply/],
  ["1" + "+1".repeat(1000), /too long/],
];

for (const [expression, value] of GOOD) {
  test(`${expression} is ${value}`, () => assert.equal(calculate(expression), value));
}
for (const [expression, why] of BAD) {
  test(`${JSON.stringify(expression.slice(0, 20))} is refused: ${why}`, () => {
    assert.throws(() => calculate(expression), why);
  });
}

test("numbers are written without the noise of binary fractions", () => {
  assert.equal(formatNumber(calculate("0.1 + 0.2")), "0.3");
  assert.equal(formatNumber(calculate("17 * 25")), "425");
});

test("the weather is the same for a city every time, and says that it is invented", () => {
  const first = runTool("get_weather", '{"city": "Oslo"}');
  assert.deepEqual(runTool("get_weather", '{"city": "Oslo"}'), first);
  assert.match(JSON.parse(first.result).note, /invented/);
});

for (const [name, json, why] of [
  ["calculator", "{", /not JSON/],
  ["calculator", "[]", /not an object/],
  ["calculator", "{}", /expression should be a string/],
  ["get_weather", '{"city": 3}', /city should be a string/],
  ["toString", "{}", /no tool/],
]) {
  test(`${name} of ${json} fails with a reason`, () => {
    const { result, failed } = runTool(name, json);
    assert.equal(failed, true);
    assert.match(JSON.parse(result).error, why);
  });
}

test("definitions are functions with one required parameter", () => {
  for (const [name, { definition }] of Object.entries(TOOLS)) {
    assert.equal(definition.function.name, name);
    assert.equal(definition.function.parameters.required.length, 1);
  }
});
