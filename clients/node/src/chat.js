// Turns of a chat and the tools that a model may call in it, as messages of scheduler.proto.

import { array, fields, string } from './fields.js';
import { json } from './grammars.js';

/**
 * One turn of a chat.
 *
 * @typedef {object} Message
 * @property {string} role system, user, assistant, tool, or another role of the model's chat template.
 * @property {string | null} [content] May be left out beside tool calls.
 * @property {string} [name] Of who speaks, where the template uses it.
 * @property {(ToolCall | { id: string, type?: 'function', function: Omit<ToolCall, 'id'> })[]} [toolCalls] An
 *   assistant's.
 * @property {string} [toolCallId] Of a tool's answer: the call that it answers.
 */

/**
 * A call that the model asks for.
 *
 * @typedef {object} ToolCall
 * @property {string} id
 * @property {string} name
 * @property {string} arguments JSON, as the model wrote it; a beginning of it if maxTokens cut the call off.
 */

/**
 * A function that the model may call.
 *
 * @typedef {object} Tool
 * @property {string} name
 * @property {string} [description]
 * @property {object | string} [parameters] A JSON schema of an object, its arguments; default: it takes none.
 */

/** @typedef {Tool | { type?: 'function', function: Tool }} ToolLike A tool, plain or as OpenAI's API has it. */

/** @typedef {'auto' | 'none' | 'required' | (string & {})} ToolChoice Or the name of a tool. */

export const CHAT_OPTIONS = ['tools', 'toolChoice', 'templateArguments', 'continueFinalMessage'];

/**
 * @param {Message[]} messages
 * @param {Record<string, any>} [options] With those of CHAT_OPTIONS.
 * @returns {object} A Messages message.
 */
export function chat(messages, options = {}) {
  /** @type {Record<string, any>} */
  const wire = { messages: array('messages', messages).map((message, i) => turn(`messages[${i}]`, message)) };
  if ('tools' in options) wire.tools = array('tools', options.tools).map((one, i) => tool(`tools[${i}]`, one));
  if ('toolChoice' in options) wire.toolChoice = toolChoice(options.toolChoice);
  if ('templateArguments' in options) wire.templateArguments = struct('templateArguments', options.templateArguments);
  if ('continueFinalMessage' in options) wire.continueFinalMessage = Boolean(options.continueFinalMessage);
  return wire;
}

/**
 * The answer as a turn of the conversation, to be sent back with the next request.
 *
 * @param {{ text: string, toolCalls: ToolCall[] }} completion
 * @returns {Message}
 */
export function assistantMessage({ text, toolCalls }) {
  return { role: 'assistant', content: text, ...(toolCalls.length > 0 && { toolCalls }) };
}

/**
 * The turn that gives a tool's result to the model: text as it is, anything else as JSON.
 *
 * @param {ToolCall} call
 * @param {unknown} result
 * @returns {Message}
 */
export function toolMessage({ id, name }, result) {
  const content = typeof result === 'string' ? result : JSON.stringify(result) ?? 'null';
  return { role: 'tool', content, name, toolCallId: id };
}

/**
 * @param {string} name
 * @param {unknown} message
 */
function turn(name, message) {
  const { toolCalls, ...given } = fields(name, message, ['role', 'content', 'name', 'toolCalls', 'toolCallId']);
  const needed = toolCalls?.length > 0 ? ['role'] : ['role', 'content'];
  for (const field of needed) if (!(field in given)) throw new TypeError(`${name} has no ${field}`);
  for (const [field, value] of Object.entries(given)) string(`${name}.${field}`, value);
  if (toolCalls === undefined) return given;
  return { ...given, toolCalls: array(`${name}.toolCalls`, toolCalls).map((one, i) => call(`${name}.toolCalls[${i}]`, one)) };
}

/**
 * @param {string} name
 * @param {unknown} given
 */
function call(name, given) {
  const wire = fields(name, flat(given), ['id', 'name', 'arguments']);
  for (const [field, value] of Object.entries(wire)) string(`${name}.${field}`, value);
  return wire;
}

const NO_PARAMETERS = { type: 'object', properties: {}, additionalProperties: false };

/**
 * @param {string} name
 * @param {unknown} given
 */
function tool(name, given) {
  const { parameters = NO_PARAMETERS, ...wire } = fields(name, flat(given), ['name', 'description', 'parameters']);
  if (!wire.name) throw new TypeError(`${name} has no name`);
  for (const [field, value] of Object.entries(wire)) string(`${name}.${field}`, value);
  return { ...wire, parameters: json(`${name}.parameters`, parameters) };
}

/**
 * What OpenAI's API has below `function` stands beside the rest.
 *
 * @param {any} given
 */
function flat(given) {
  if (typeof given?.function !== 'object') return given;
  const { type, function: below, ...rest } = given;
  return type === undefined || type === 'function' ? { ...rest, ...below } : given;
}

/** @type {Record<string, string>} */
const CHOICES = { auto: 'TOOL_CHOICE_MODE_AUTO', none: 'TOOL_CHOICE_MODE_NONE', required: 'TOOL_CHOICE_MODE_REQUIRED' };

/** @param {any} given */
function toolChoice(given) {
  const choice = flat(given)?.name ?? given;
  if (typeof choice !== 'string' || choice === '') {
    throw new TypeError(`toolChoice must be ${Object.keys(CHOICES).join(', ')} or a tool's name`);
  }
  if (Object.hasOwn(CHOICES, choice)) return { mode: CHOICES[choice] };
  return { mode: CHOICES.required, name: string('toolChoice', choice) };
}

/**
 * @param {string} name
 * @param {any} given A plain object.
 * @returns {object} A google.protobuf.Struct.
 */
function struct(name, given) {
  if (typeof given !== 'object' || given === null || Array.isArray(given)) throw new TypeError(`${name} must be an object`);
  const entries = Object.entries(given).filter(([, value]) => value !== undefined);
  return { fields: Object.fromEntries(entries.map(([key, value]) => [key, structValue(`${name}.${key}`, value)])) };
}

/**
 * @param {string} name
 * @param {any} value
 * @returns {object} A google.protobuf.Value.
 */
function structValue(name, value) {
  if (value === null) return { nullValue: 'NULL_VALUE' };
  if (typeof value === 'boolean') return { boolValue: value };
  if (typeof value === 'number') return { numberValue: value };
  if (typeof value === 'string') return { stringValue: string(name, value) };
  if (Array.isArray(value)) return { listValue: { values: value.map((one, i) => structValue(`${name}[${i}]`, one)) } };
  return { structValue: struct(name, value) };
}
