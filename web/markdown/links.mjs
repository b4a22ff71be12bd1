// Which addresses become links, and where an address ends that stands in the middle of a text.

const MAX_CHARACTERS = 2000;
const TRAILING = /[.,;:!?'"*_~)\]}]$/;
const PARTNERS = new Map([[")", "("], ["]", "["], ["}", "{"]]);

/**
 * Return an address that is safe to open, "" for all others: scripts, files, pages of this server.
 * @param {string} address
 */
export function safeAddress(address) {
  if (address.length > MAX_CHARACTERS || !/^https?:\/\/[^/]/i.test(address)) return "";
  try {
    const url = new URL(address);
    return /^https?:$/.test(url.protocol) && url.hostname && !url.username && !url.password ? url.href : "";
  } catch {
    return "";
  }
}

/**
 * Cut off what follows an address in a sentence, but none of its own brackets.
 * @param {string} found
 */
export function trimmedAddress(found) {
  let text = found.slice(0, MAX_CHARACTERS);
  while (TRAILING.test(text)) {
    const last = text[text.length - 1];
    const partner = PARTNERS.get(last);
    if (partner && count(text, partner) >= count(text, last)) break;
    text = text.slice(0, -1);
  }
  return text;
}

/** @param {string} text @param {string} character */
function count(text, character) {
  return text.split(character).length - 1;
}
