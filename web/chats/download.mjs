// Gives the user a file of a text that is here.

/** @param {string} name @param {string} text @param {string} type */
export function download(name, text, type) {
  const address = URL.createObjectURL(new Blob([text], { type: `${type};charset=utf-8` }));
  const link = document.createElement("a");
  link.href = address;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000); // browsers read it a little later
}
