// The two tools that the page offers to the model, and what they answer.

import { calculate, formatNumber } from "./calculator.mjs";

/** @typedef {{definition: object, run: (args: Record<string, unknown>) => object}} Tool */

const SKIES = ["clear", "partly cloudy", "overcast", "light rain", "windy"];

/** @type {Record<string, Tool>} */
export const TOOLS = {
  calculator: {
    definition: describe("calculator", "Compute an arithmetic expression.", "expression"),
    run: (args) => ({ result: formatNumber(calculate(text(args, "expression"))) }),
  },
  get_weather: {
    definition: describe("get_weather", "Get the current weather in a city.", "city"),
    run: (args) => sampleWeather(text(args, "city")),
  },
};

/**
 * Run a call of the model's; what is wrong with it is an answer, too, for the model to read.
 * @param {string} name
 * @param {string} json
 * @returns {{result: string, failed: boolean}}
 */
export function runTool(name, json) {
  try {
    if (!Object.hasOwn(TOOLS, name)) throw new Error(`there is no tool ${JSON.stringify(name)}`);
    let args;
    try {
      args = JSON.parse(json || "{}");
    } catch {
      throw new Error("the arguments are not JSON");
    }
    if (args === null || typeof args !== "object" || Array.isArray(args)) {
      throw new Error("the arguments are not an object");
    }
    return { result: spaced(TOOLS[name].run(args)), failed: false };
  } catch (error) {
    const message = error instanceof Error ? error.message : String(error);
    return { result: spaced({ error: message }), failed: true };
  }
}

/**
 * Invent the weather: the same for a city every time, and labelled as invented.
 * @param {string} city
 */
function sampleWeather(city) {
  let hash = 7;
  for (const character of city.toLowerCase()) hash = (hash * 31 + (character.codePointAt(0) ?? 0)) >>> 0;
  return {
    city,
    temperature_c: 4 + (hash % 25),
    condition: SKIES[hash % SKIES.length],
    note: "invented sample, not a real observation",
  };
}

/**
 * Write an object as models write their arguments: with spaces, where lines can break.
 * @param {object} result
 */
function spaced(result) {
  const fields = Object.entries(result).map(([name, value]) => `${JSON.stringify(name)}: ${JSON.stringify(value)}`);
  return `{${fields.join(", ")}}`;
}

/** @param {Record<string, unknown>} args @param {string} name */
function text(args, name) {
  const value = args[name];
  if (typeof value !== "string" || !value.trim()) throw new Error(`${name} should be a string`);
  return value;
}

/** @param {string} name @param {string} description @param {string} parameter */
function describe(name, description, parameter) {
  const parameters = {
    type: "object",
    properties: { [parameter]: { type: "string" } },
    required: [parameter],
    additionalProperties: false,
  };
  return { type: "function", function: { name, description, parameters } };
}
