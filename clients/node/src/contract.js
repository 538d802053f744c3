// The contract, loaded once from the package's copy of the proto files.

import { existsSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

import grpc from '@grpc/grpc-js';
import protoLoader from '@grpc/proto-loader';

const root = fileURLToPath(new URL('../protos', import.meta.url));
const file = 'paceline/scheduler/v1/scheduler.proto';

if (!existsSync(`${root}/${file}`)) {
  throw new Error(`${root}/${file} is missing: run "npm run build" in clients/node`);
}

const definition = protoLoader.loadSync(file, {
  includeDirs: [root],
  longs: Number, // counters; exact below 2^53
  enums: String,
  defaults: true,
  oneofs: true,
});

/** @type {any} */
const contract = grpc.loadPackageDefinition(definition);

export const SchedulerService = contract.paceline.scheduler.v1.SchedulerService;
