// Copying, also on pages without TLS, where browsers have no clipboard for scripts.

/**
 * Copy a text; returns whether it worked.
 * @param {string} text
 */
export async function copyText(text) {
  try {
    await navigator.clipboard.writeText(text);
    return true;
  } catch {
    return copySelected(text);
  }
}

/** @param {string} text */
function copySelected(text) {
  const before = /** @type {HTMLElement | null} */ (document.activeElement);
  const field = document.createElement("textarea");
  field.value = text;
  field.className = "unseen";
  document.body.append(field);
  field.select();
  const done = document.execCommand("copy");
  field.remove();
  before?.focus();
  return done;
}
