// What TeX's commands for single signs stand for, in Unicode.

/** @param {string} pairs words and signs in turn @returns {[string, string][]} */
function pairsOf(pairs) {
  const words = pairs.trim().split(/\s+/);
  return words.flatMap((word, index) => (index % 2 ? [] : [/** @type {[string, string]} */ ([word, words[index + 1]])]));
}

/** Letters: drawn as variables are. */
export const LETTERS = new Map(pairsOf(`
  alpha α beta β gamma γ delta δ epsilon ϵ varepsilon ε zeta ζ eta η theta θ vartheta ϑ iota ι kappa κ
  lambda λ mu μ nu ν xi ξ omicron ο pi π varpi ϖ rho ρ varrho ϱ sigma σ varsigma ς tau τ upsilon υ
  phi ϕ varphi φ chi χ psi ψ omega ω Gamma Γ Delta Δ Theta Θ Lambda Λ Xi Ξ Pi Π Sigma Σ Upsilon Υ
  Phi Φ Psi Ψ Omega Ω ell ℓ hbar ℏ imath ı jmath ȷ Re ℜ Im ℑ wp ℘ aleph ℵ beth ℶ partial ∂ nabla ∇
  infty ∞ emptyset ∅ varnothing ∅ top ⊤ bot ⊥ degree ° dots … ldots … cdots ⋯ vdots ⋮ ddots ⋱
  dotsc … dotsb ⋯ square □ Box □ blacksquare ■ triangle △ checkmark ✓ S § P ¶ pounds £ euro €
  prime ′ angle ∠ flat ♭ sharp ♯ clubsuit ♣ diamondsuit ♢ heartsuit ♡ spadesuit ♠ star ⋆
`));

/** Operators and relations. */
export const OPERATORS = new Map(pairsOf(`
  pm ± mp ∓ times × div ÷ cdot ⋅ ast ∗ circ ∘ bullet • oplus ⊕ ominus ⊖ otimes ⊗ odot ⊙ oslash ⊘
  cap ∩ cup ∪ sqcap ⊓ sqcup ⊔ wedge ∧ land ∧ vee ∨ lor ∨ neg ¬ lnot ¬ setminus ∖ wr ≀ dagger † amalg ⨿
  leq ≤ le ≤ leqslant ⩽ geq ≥ ge ≥ geqslant ⩾ neq ≠ ne ≠ ll ≪ gg ≫ approx ≈ sim ∼ simeq ≃ cong ≅
  equiv ≡ propto ∝ asymp ≍ doteq ≐ prec ≺ succ ≻ preceq ⪯ succeq ⪰ coloneqq ≔ triangleq ≜
  in ∈ notin ∉ ni ∋ subset ⊂ supset ⊃ subseteq ⊆ supseteq ⊇ subsetneq ⊊ supsetneq ⊋ forall ∀
  exists ∃ nexists ∄ mid ∣ nmid ∤ parallel ∥ perp ⊥ vdash ⊢ dashv ⊣ models ⊨ vDash ⊨ therefore ∴ because ∵
  to → rightarrow → leftarrow ← gets ← leftrightarrow ↔ Rightarrow ⇒ Leftarrow ⇐ Leftrightarrow ⇔
  implies ⟹ impliedby ⟸ iff ⟺ longrightarrow ⟶ longleftarrow ⟵ Longrightarrow ⟹ Longleftarrow ⟸
  Longleftrightarrow ⟺ mapsto ↦ longmapsto ⟼ hookrightarrow ↪ uparrow ↑ downarrow ↓ updownarrow ↕
  Uparrow ⇑ Downarrow ⇓ nearrow ↗ searrow ↘ swarrow ↙ nwarrow ↖ rightharpoonup ⇀ rightleftharpoons ⇌
  colon : lt < gt > vert | Vert ‖ backslash \\ lbrace { rbrace } { { } } | ‖ % % # # $ $ & & _ _
`));

/** Operators whose limits stand under and over them where there is room. */
export const LARGE_OPERATORS = new Map(pairsOf(`
  sum ∑ prod ∏ coprod ∐ bigcup ⋃ bigcap ⋂ bigvee ⋁ bigwedge ⋀ bigoplus ⨁ bigotimes ⨂ bigsqcup ⨆
`));

/** Large operators whose limits stand behind them. */
export const INTEGRALS = new Map(pairsOf("int ∫ iint ∬ iiint ∭ oint ∮"));

/** Names set upright; those of the second kind take their limits underneath. */
export const FUNCTIONS = new Set(
  "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh coth exp log ln lg arg deg dim hom ker".split(" "),
);
export const LIMIT_FUNCTIONS = new Set("lim limsup liminf max min sup inf det gcd Pr argmax argmin".split(" "));

export const DELIMITERS = new Map(pairsOf(`
  langle ⟨ rangle ⟩ lceil ⌈ rceil ⌉ lfloor ⌊ rfloor ⌋ lvert | rvert | lVert ‖ rVert ‖ lbrack [ rbrack ]
  vert | Vert ‖ lbrace { rbrace } { { } } | ‖ uparrow ↑ downarrow ↓ backslash \\
`));

export const ACCENTS = new Map(pairsOf(`
  hat ^ widehat ^ tilde ~ widetilde ~ bar ¯ overline ‾ vec → dot ˙ ddot ¨ acute ´ grave \` check ˇ
  breve ˘ mathring ˚ overrightarrow → overbrace ⏞
`));
export const UNDER_ACCENTS = new Map(pairsOf("underline _ underbrace ⏟"));

/** Spaces by their width in em. */
export const SPACES = new Map(
  Object.entries({ ",": 0.167, ":": 0.222, ">": 0.222, ";": 0.278, "!": -0.167, " ": 0.25, "~": 0.25, quad: 1, qquad: 2,
    thinspace: 0.167, medspace: 0.222, thickspace: 0.278, enspace: 0.5 }),
);

/** Commands that only fine-tune looks: they are left out. */
export const SILENT = new Set(
  ("displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits big Big bigg Bigg bigl bigr Bigl Bigr " +
    "biggl biggr Biggl Biggr bigm Bigm middle nonumber notag hline centering rm it bf").split(" "),
);

// Where an alphabet of styled letters begins: capitals, small letters, digits.
const ALPHABETS = new Map([
  ["mathbf", [0x1d400, 0x1d41a, 0x1d7ce]],
  ["boldsymbol", [0x1d468, 0x1d482, 0x1d7ce]],
  ["bm", [0x1d468, 0x1d482, 0x1d7ce]],
  ["mathbb", [0x1d538, 0x1d552, 0x1d7d8]],
  ["mathcal", [0x1d49c, 0x1d4b6, 0]],
  ["mathscr", [0x1d49c, 0x1d4b6, 0]],
  ["mathfrak", [0x1d504, 0x1d51e, 0]],
  ["mathsf", [0x1d5a0, 0x1d5ba, 0x1d7e2]],
  ["mathtt", [0x1d670, 0x1d68a, 0x1d7f6]],
]);
// Letters that Unicode had before these alphabets came.
const OLDER = new Map(Object.entries({
  "𝔺": "ℂ", "𝔿": "ℍ", "𝕅": "ℕ", "𝕇": "ℙ", "𝕈": "ℚ", "𝕉": "ℝ", "𝕑": "ℤ",
  "𝒝": "ℬ", "𝒠": "ℰ", "𝒡": "ℱ", "𝒣": "ℋ", "𝒤": "ℐ", "𝒧": "ℒ", "𝒨": "ℳ", "𝒭": "ℛ",
  "𝒺": "ℯ", "𝒼": "ℊ", "𝓄": "ℴ", "𝔆": "ℭ", "𝔋": "ℌ", "𝔌": "ℑ", "𝔕": "ℜ", "𝔝": "ℨ",
}));

/** @param {string} command */
export const isAlphabet = (command) => ALPHABETS.has(command);

/**
 * Write a letter or digit in one of TeX's alphabets; other signs stay as they are.
 * @param {string} sign @param {string} command
 */
export function styled(sign, command) {
  const [capitals, smalls, digits] = ALPHABETS.get(command) ?? [0, 0, 0];
  const code = sign.codePointAt(0) ?? 0;
  let first = 0;
  let base = 0;
  if (/^[A-Z]$/.test(sign)) [first, base] = [capitals, 65];
  else if (/^[a-z]$/.test(sign)) [first, base] = [smalls, 97];
  else if (/^[0-9]$/.test(sign)) [first, base] = [digits, 48];
  if (!first) return sign;
  const found = String.fromCodePoint(first + code - base);
  return OLDER.get(found) ?? found;
}
