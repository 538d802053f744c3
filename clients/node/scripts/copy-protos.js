// Copies the public contract into the package, which is loaded at run time. The only source is
// the repository's protos/; nothing here is committed twice.

import { cpSync, existsSync, rmSync } from 'node:fs';
import { fileURLToPath } from 'node:url';

const source = fileURLToPath(new URL('../../../protos/paceline/scheduler', import.meta.url));
const target = fileURLToPath(new URL('../protos/paceline/scheduler', import.meta.url));

if (existsSync(source)) {
  rmSync(target, { recursive: true, force: true });
  cpSync(source, target, { recursive: true });
} else if (!existsSync(target)) {
  throw new Error(`neither ${source} nor ${target} exists: build in a checkout of Paceline`);
}
