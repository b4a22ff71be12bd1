// The one way in which this page makes elements: attributes and text nodes, never markup.

/**
 * Make an element.
 * @param {string} tag
 * @param {Record<string, string | number | boolean | null>} [attributes] `text` becomes a text node
 * @param {(Node | string)[]} [children]
 * @returns {HTMLElement}
 */
export function element(tag, attributes = {}, children = []) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "text") made.append(String(value));
    else if (value === true) made.setAttribute(name, "");
    else if (value !== null && value !== false) made.setAttribute(name, String(value));
  }
  made.append(...children);
  return made;
}
