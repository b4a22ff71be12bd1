// MessagePack out of bytes: what /timeline answers with. Numbers, text, bytes, arrays and maps.

const MAX_DEPTH = 32;

/**
 * Read one value; throws an Error where the bytes are none.
 * @param {Uint8Array} bytes
 * @returns {any}
 */
export function unpack(bytes) {
  return new Reader(bytes).value(0);
}

class Reader {
  #at = 0;

  /** @param {Uint8Array} bytes */
  constructor(bytes) {
    this.bytes = bytes;
    this.view = new DataView(bytes.buffer, bytes.byteOffset, bytes.byteLength);
  }

  /** @param {number} depth @returns {any} */
  value(depth) {
    if (depth > MAX_DEPTH) throw new Error("nested too deeply");
    const tag = this.view.getUint8(this.#step(1));
    if (tag < 0x80) return tag;
    if (tag >= 0xe0) return tag - 0x100;
    if (tag < 0x90) return this.#map(tag & 0x0f, depth);
    if (tag < 0xa0) return this.#array(tag & 0x0f, depth);
    if (tag < 0xc0) return this.#text(tag & 0x1f);
    switch (tag) {
      case 0xc0: return null;
      case 0xc2: return false;
      case 0xc3: return true;
      case 0xc4: return this.#slice(this.#unsigned(1));
      case 0xc5: return this.#slice(this.#unsigned(2));
      case 0xc6: return this.#slice(this.#unsigned(4));
      case 0xca: return this.view.getFloat32(this.#step(4));
      case 0xcb: return this.view.getFloat64(this.#step(8));
      case 0xcc: return this.#unsigned(1);
      case 0xcd: return this.#unsigned(2);
      case 0xce: return this.#unsigned(4);
      case 0xcf: return Number(this.view.getBigUint64(this.#step(8)));
      case 0xd0: return this.view.getInt8(this.#step(1));
      case 0xd1: return this.view.getInt16(this.#step(2));
      case 0xd2: return this.view.getInt32(this.#step(4));
      case 0xd3: return Number(this.view.getBigInt64(this.#step(8)));
      case 0xd9: return this.#text(this.#unsigned(1));
      case 0xda: return this.#text(this.#unsigned(2));
      case 0xdb: return this.#text(this.#unsigned(4));
      case 0xdc: return this.#array(this.#unsigned(2), depth);
      case 0xdd: return this.#array(this.#unsigned(4), depth);
      case 0xde: return this.#map(this.#unsigned(2), depth);
      case 0xdf: return this.#map(this.#unsigned(4), depth);
      default: throw new Error(`byte ${tag} begins no value`);
    }
  }

  /** @param {number} size */
  #step(size) {
    const at = this.#at;
    if (at + size > this.bytes.length) throw new Error("ends too early");
    this.#at = at + size;
    return at;
  }

  /** @param {1 | 2 | 4} size */
  #unsigned(size) {
    const at = this.#step(size);
    if (size === 1) return this.view.getUint8(at);
    return size === 2 ? this.view.getUint16(at) : this.view.getUint32(at);
  }

  /** @param {number} size */
  #slice(size) {
    const at = this.#step(size);
    return this.bytes.subarray(at, at + size);
  }

  /** @param {number} size */
  #text(size) {
    return new TextDecoder().decode(this.#slice(size));
  }

  /** @param {number} length @param {number} depth */
  #array(length, depth) {
    const found = [];
    for (let index = 0; index < length; index += 1) found.push(this.value(depth + 1));
    return found;
  }

  /** @param {number} length @param {number} depth */
  #map(length, depth) {
    const found = new Map();
    for (let index = 0; index < length; index += 1) {
      const key = this.value(depth + 1);
      found.set(key, this.value(depth + 1));
    }
    return Object.fromEntries(found);
  }
}
