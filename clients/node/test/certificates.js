// Certificates of an authority of the test's own: Node makes none.

import { execFileSync } from 'node:child_process';

import grpc from '@grpc/grpc-js';

import { python } from './serve.js';

const SCRIPT = `
import json, sys, trustme
authority = trustme.CA()
issued = [authority.issue_cert(name) for name in sys.argv[1:]]
pairs = [[one.private_key_pem.bytes().decode(), one.cert_chain_pems[0].bytes().decode()] for one in issued]
print(json.dumps([authority.cert_pem.bytes().decode(), pairs]))
`;

/**
 * @param {...string} names
 * @returns {{ ca: Buffer, credentials: grpc.ServerCredentials[] }} A server's, for each name.
 */
export function authority(...names) {
  const [ca, pairs] = JSON.parse(execFileSync(python(), ['-c', SCRIPT, ...names], { encoding: 'utf8' }));
  const credentials = pairs.map(([key, chain]) =>
    grpc.ServerCredentials.createSsl(null, [{ private_key: Buffer.from(key), cert_chain: Buffer.from(chain) }]),
  );
  return { ca: Buffer.from(ca), credentials };
}
