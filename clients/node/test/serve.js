// A live service to test against: PACELINE_ADDRESS, or an oracle-backed `paceline serve` of our own.

import { spawn } from 'node:child_process';
import { existsSync, mkdtempSync, readFileSync, rmSync } from 'node:fs';
import { once } from 'node:events';
import { tmpdir } from 'node:os';
import { delimiter, join } from 'node:path';
import { setTimeout as sleep } from 'node:timers/promises';
import { fileURLToPath } from 'node:url';

const repository = fileURLToPath(new URL('../../..', import.meta.url));

/**
 * @param {...string} further Options of `paceline serve`, for a service of the test's own.
 * @returns {Promise<{ address: string, stop: () => Promise<void> }>}
 */
export async function serve(...further) {
  if (process.env.PACELINE_ADDRESS && further.length === 0) return { address: process.env.PACELINE_ADDRESS, stop: async () => {} };
  const scratch = mkdtempSync(join(tmpdir(), 'paceline-node-'));
  const portFile = join(scratch, 'port');
  const options = ['--backend', 'oracle', '--port', '0', '--port-file', portFile, '-E', 'step-ms=1', ...further];
  const child = spawn(python(), ['-m', 'paceline', 'serve', ...options], {
    cwd: repository,
    env: { ...process.env, PYTHONPATH: [repository, join(repository, 'clients/python')].join(delimiter) },
    stdio: ['ignore', 'inherit', 'inherit'],
  });
  const exited = once(child, 'exit');
  while (!existsSync(portFile)) {
    if (child.exitCode !== null) throw new Error(`paceline serve ended with status ${child.exitCode}`);
    await sleep(50);
  }
  return {
    address: `127.0.0.1:${readFileSync(portFile, 'utf8').trim()}`,
    async stop() {
      child.kill('SIGTERM');
      await exited;
      rmSync(scratch, { recursive: true });
    },
  };
}

/** The Python that runs the service. */
export function python() {
  if (process.env.PACELINE_PYTHON) return process.env.PACELINE_PYTHON;
  const inVenv = join(repository, '.venv/bin/python');
  return existsSync(inVenv) ? inVenv : 'python3';
}
