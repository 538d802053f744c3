// What output must match, from plain options.

import { string } from './fields.js';

/** Options of which one at most may be given, and the fields of Grammar that they are. */
const FIELDS = {
  schema: 'jsonSchema',
  regex: 'regex',
  choices: 'choices',
  grammar: 'lark',
  structuralTag: 'structuralTag',
};

export const GRAMMARS = Object.keys(FIELDS);

/**
 * @param {Record<string, any>} given Options.
 * @returns {object | undefined} A Grammar message, if one of the options is there.
 */
export function grammar(given) {
  const names = GRAMMARS.filter((name) => name in given);
  if (names.length > 1) throw new TypeError(`${names[1]}: only one of ${GRAMMARS.join(', ')}`);
  if (names.length === 0) return undefined;
  const name = /** @type {keyof typeof FIELDS} */ (names[0]);
  return { [FIELDS[name]]: value(name, given[name]) };
}

/**
 * @param {string} name
 * @param {any} given
 */
function value(name, given) {
  if (name === 'choices') {
    if (!Array.isArray(given)) throw new TypeError('choices must be an array of strings');
    return { choices: given.map((choice, i) => string(`choices[${i}]`, choice)) };
  }
  if (name === 'schema' || name === 'structuralTag') return json(name, given);
  return string(name, given);
}

/**
 * JSON as it is, or an object as JSON.
 *
 * @param {string} name
 * @param {unknown} given
 * @returns {string}
 */
export function json(name, given) {
  if (typeof given === 'string') return string(name, given);
  if (typeof given !== 'object' || given === null || Array.isArray(given)) {
    throw new TypeError(`${name} must be an object or JSON`);
  }
  return JSON.stringify(given);
}
