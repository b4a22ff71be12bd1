// The languages whose code is coloured: their words, comments and strings, as `highlight.mjs` reads them.

/**
 * @typedef {object} Language
 * @property {string[]} [comments] what begins a comment to the line's end
 * @property {[open: string, close: string, kind: string][]} [spans] what may go over several lines
 * @property {string} [quotes] the marks of strings that end on their line
 * @property {Set<string>} [keywords]
 * @property {Set<string>} [constants]
 * @property {[kind: string, pattern: string][]} [more] patterns that come before all others
 * @property {boolean} [anyCase] whether keywords may be written in capitals
 */

/** @param {string} words */
const set = (words) => new Set(words.trim().split(/\s+/));

/** @type {Language} */
const PYTHON = {
  comments: ["#"],
  spans: [['"""', '"""', "string"], ["'''", "'''", "string"]],
  quotes: "\"'",
  keywords: set(`and as assert async await break case class continue def del elif else except finally for from global
    if import in is lambda match nonlocal not or pass raise return try while with yield`),
  constants: set("True False None self cls NotImplemented"),
  more: [["tag", "@[\\w.]+"]],
};

/** @type {Language} */
const SCRIPT = {
  comments: ["//"],
  spans: [["/*", "*/", "comment"], ["`", "`", "string"]],
  quotes: "\"'",
  keywords: set(`abstract as async await break case catch class const continue debugger declare default delete do else
    enum export extends finally for from function get if implements import in infer instanceof interface is keyof let
    namespace new of private protected public readonly return satisfies set static super switch throw try type typeof
    var void while with yield`),
  constants: set("true false null undefined NaN Infinity this any string number boolean unknown never object"),
};

/** @type {Language} */
const JSON_TEXT = {
  comments: ["//"],
  spans: [["/*", "*/", "comment"]],
  quotes: '"',
  constants: set("true false null"),
  more: [["property", '"(?:[^"\\\\]|\\\\.)*"(?=\\s*:)']],
};

/** @type {Language} */
const SHELL = {
  comments: ["#"],
  quotes: "\"'",
  keywords: set(`case do done elif else esac export fi for function if in local return select set source then until
    while alias cd echo eval exec exit read shift sudo trap unset`),
  more: [["constant", "\\$(?:\\{[^}\\n]*\\}|\\w+|[@#?$!*-])"], ["attribute", "(?<=\\s)--?[A-Za-z][\\w-]*"], ["plain", "[\\w./:@-]*[\\w./:@-]#"]],
};

/** @type {Language} */
const C_LIKE = {
  comments: ["//"],
  spans: [["/*", "*/", "comment"]],
  quotes: "\"'",
  keywords: set(`abstract alignas alignof as async auto await base break case catch chan class concept const constexpr
    continue crate decltype default defer delete do dyn else enum event explicit export extends extern final finally fn
    for foreach friend func fun go goto if impl implements import in inline instanceof interface internal is let lock
    loop map match mod module move mut mutable namespace native new noexcept object operator out override package params
    private protected pub public range readonly ref register return sealed select self sizeof static static_cast struct
    super switch synchronized template this throw throws trait try type typedef typename union unsafe use using val var
    virtual volatile when where while yield`),
  constants: set(`true false null nullptr nil NULL None Some Ok Err void bool boolean byte char short int long float double
    signed unsigned string str String size_t usize isize u8 u16 u32 u64 i8 i16 i32 i64 f32 f64 int8_t int32_t int64_t
    uint8_t uint32_t uint64_t error rune iota Self`),
  more: [["tag", "^\\s*#\\s*(?:include|define|ifn?def|if|else|elif|endif|pragma|undef|error)\\b"], ["tag", "#!?\\[[^\\]\\n]*\\]"], ["plain", "'\\w+(?!')\\b"]],
};

/** @type {Language} */
const SQL = {
  comments: ["--"],
  spans: [["/*", "*/", "comment"]],
  quotes: "'\"`",
  anyCase: true,
  keywords: set(`add all alter and any as asc begin between by cascade case check column commit constraint create cross
    database default delete desc distinct drop else end exists explain fetch first following for foreign from full
    function group having if in index inner insert intersect into is join key last left like limit materialized not
    null offset on only or order outer over partition preceding primary procedure range recursive references replace
    returning revoke right rollback row rows select set table temporary then to transaction trigger truncate unbounded
    union unique update using values view when where window with`),
  constants: set(`true false int integer bigint smallint serial text varchar char boolean date time timestamp timestamptz
    interval numeric decimal real double float json jsonb uuid bytea`),
};

/** @type {Language} */
const MARKUP = {
  spans: [["<!--", "-->", "comment"]],
  more: [
    ["tag", "</?[A-Za-z][\\w:.-]*|/?>|<[!?]\\w+"],
    ["attribute", "[\\w:@.-]+(?==[\"'])"],
    ["string", "(?<==)(?:\"[^\"\\n]*\"|'[^'\\n]*')"],
    ["constant", "&#?\\w+;"],
    ["plain", "[\\w'’-]+"],
  ],
};

/** @type {Language} */
const STYLES = {
  spans: [["/*", "*/", "comment"]],
  quotes: "\"'",
  more: [["keyword", "@[\\w-]+"], ["property", "--[\\w-]+|[a-z-]+(?=\\s*:\\s)"], ["number", "#[0-9a-fA-F]{3,8}\\b"], ["tag", "[.#][A-Za-z][\\w-]*"]],
};

/** @type {Language} */
const CONFIG = {
  comments: ["#"],
  quotes: "\"'",
  constants: set("true false null yes no on off"),
  more: [["tag", "^\\s*\\[[^\\]\\n]*\\]\\s*$"], ["property", "(?<=^[\\s-]*)[\\w.-]+(?=\\s*[:=])"]],
};

/** @type {Language} */
const DIFFERENCE = {
  more: [["tag", "^(?:@@.*|diff .*|index .*|(?:---|\\+\\+\\+) .*)$"], ["added", "^\\+.*$"], ["removed", "^-.*$"]],
};

/** @type {Map<string, Language>} */
const LANGUAGES = new Map();
for (const [names, language] of /** @type {[string, Language][]} */ ([
  ["python py python3 pycon ipython", PYTHON],
  ["javascript js jsx mjs cjs typescript ts tsx node", SCRIPT],
  ["json jsonc json5 jsonl", JSON_TEXT],
  ["shell sh bash zsh console shell-session terminal dockerfile makefile", SHELL],
  ["c h cpp c++ cc hpp cuda java kotlin kt go golang rust rs c# cs csharp swift scala dart php objc glsl zig", C_LIKE],
  ["sql postgres postgresql mysql sqlite plsql", SQL],
  ["html xml svg vue svelte xhtml", MARKUP],
  ["css scss less", STYLES],
  ["yaml yml toml ini env properties", CONFIG],
  ["diff patch", DIFFERENCE],
])) for (const name of names.split(" ")) LANGUAGES.set(name, language);

/** @param {string} name as it stands behind the fence @returns {Language | null} */
export function languageOf(name) {
  return LANGUAGES.get(name.toLowerCase()) ?? null;
}
