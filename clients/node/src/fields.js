// What protobufjs would convert, wrap around or leave out in silence is refused here, by its name.

/**
 * @param {string} name
 * @param {unknown} value
 * @returns {string}
 */
export function string(name, value) {
  if (typeof value !== 'string') throw new TypeError(`${name} must be a string`);
  // Encoded as UTF-8, half of a surrogate pair would become another character.
  if (/[\ud800-\udfff]/u.test(value)) throw new TypeError(`${name} has half of a surrogate pair`);
  return value;
}

/**
 * @param {string} name
 * @param {any} value
 * @param {string[]} known The fields that it may have.
 * @returns {Record<string, any>} Those that it has, and are not null.
 */
export function fields(name, value, known) {
  if (typeof value !== 'object' || value === null || Array.isArray(value)) throw new TypeError(`${name} must be an object`);
  const given = Object.fromEntries(Object.entries(value).filter(([, field]) => field !== undefined && field !== null));
  for (const field of Object.keys(given)) {
    if (!known.includes(field)) throw new TypeError(`${name} has an unknown field ${field}`);
  }
  return given;
}

/**
 * @param {string} name
 * @param {unknown} value
 * @returns {any[]}
 */
export function array(name, value) {
  if (!Array.isArray(value)) throw new TypeError(`${name} must be an array`);
  return value;
}

/** @param {unknown} value */
export function isUint32(value) {
  return Number.isInteger(value) && Number(value) >= 0 && Number(value) < 2 ** 32;
}
