// Text files that go with a question: what may be attached, and how the model gets to read it.

/** @typedef {{name: string, text: string}} AttachedFile */

export const MAX_FILES = 10;
const MAX_FILE_BYTES = 256 * 1024;
const MAX_NAME_CHARACTERS = 100;

/**
 * Read a file of the user's; an Error says why one cannot be attached.
 * @param {File} file
 * @returns {Promise<AttachedFile>}
 */
export async function readTextFile(file) {
  const name = file.name.replaceAll(/[\u0000-\u001f\u007f`]/g, " ").slice(-MAX_NAME_CHARACTERS) || "file";
  if (file.size > MAX_FILE_BYTES) {
    throw new Error(`${name} has ${formatBytes(file.size)}; files of ${formatBytes(MAX_FILE_BYTES)} at most can be attached`);
  }
  const bytes = await file.arrayBuffer();
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (!text.includes("\0")) return { name, text };
  } catch {
    // Not UTF-8: the same answer as for other files that hold no text.
  }
  throw new Error(`${name} is not a text file (UTF-8)`);
}

/**
 * Write the files before the question, each in a fence that its text cannot close.
 * @param {string} content @param {AttachedFile[]} files
 */
export function withFiles(content, files) {
  const blocks = files.map(({ name, text }) => {
    const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((run) => run.length));
    const fence = "`".repeat(longest + 1);
    const language = /\.([\w+-]{1,12})$/.exec(name)?.[1] ?? "";
    return `${name}:\n\n${fence}${language}\n${text.replace(/\n$/, "")}\n${fence}`;
  });
  return [...blocks, content].filter(Boolean).join("\n\n");
}

/** @param {number} bytes */
export function formatBytes(bytes) {
  if (bytes < 1024) return `${bytes} B`;
  if (bytes < 1024 * 1024) return `${(bytes / 1024).toFixed(bytes < 10240 ? 1 : 0)} KB`;
  return `${(bytes / 1024 / 1024).toFixed(1)} MB`;
}
