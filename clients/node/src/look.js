// One look into the directory of a scheduler, which may be anybody's: bounded, whatever comes.

import protobuf from 'protobufjs';

import { deadline } from './calls.js';
import { SchedulerService } from './contract.js';
import { MAX_ENTRIES } from './directory.js';
import { fromRpc } from './errors.js';

export const LOOK_TIMEOUT_MS = 5_000;
/** Of one look's answer, each message counted as MESSAGE_BYTES more than it has. */
const MAX_LOOK_BYTES = 16 << 20;
const MESSAGE_BYTES = 64 << 10;
const ENTRIES = 1; // WatchSchedulersResponse.entries

const { path, requestSerialize, responseDeserialize } = SchedulerService.service.WatchSchedulers;

/** A look that is under way from its making on. */
export class Look {
  #call;

  /**
   * @param {any} stub
   * @param {import('@grpc/grpc-js').Metadata} metadata
   */
  constructor(stub, metadata) {
    const limit = deadline(LOOK_TIMEOUT_MS);
    this.#call = stub.makeServerStreamRequest(path, requestSerialize, parsed, {}, metadata, limit);
    this.#call.on('error', () => {}); // after its end nobody listens
  }

  /**
   * @returns {Promise<any[]>} All SchedulerEntries, as far as they are read; none of an answer that is not whole.
   */
  async entries() {
    const entries = [];
    let size = 0;
    try {
      for await (const { bytes, message } of this.#call) {
        entries.push(...message.entries);
        if (message.complete || entries.length >= MAX_ENTRIES) return entries;
        size += MESSAGE_BYTES + bytes;
        if (size >= MAX_LOOK_BYTES) break;
      }
      return [];
    } catch (error) {
      throw fromRpc(error);
    } finally {
      this.cancel();
    }
  }

  /** `entries` ends or throws soon. */
  cancel() {
    this.#call.cancel();
  }
}

/**
 * A message and its size. Throws for one of more entries than are read: to make objects of millions takes seconds.
 *
 * @param {Buffer} bytes
 */
function parsed(bytes) {
  const reader = protobuf.Reader.create(bytes);
  let entries = 0;
  while (reader.pos < reader.len) {
    const tag = reader.uint32();
    reader.skipType(tag & 7);
    if (tag >>> 3 === ENTRIES) entries += 1;
  }
  if (entries > MAX_ENTRIES) throw new Error(`${entries} entries in one message`);
  return { bytes: bytes.length, message: responseDeserialize(bytes) };
}
