"""What the tests of the fork server start."""

import os
import signal
import sys

if __name__ == "__main__":
    print(os.environ.get("GREETING", ""), *sys.argv[1:])
    print(sys.stdin.read() or "nothing to read")
    match sys.argv[1]:
        case "exit":
            sys.exit(int(sys.argv[2]))
        case "wait":
            signal.pause()
        case "descriptors":
            listed = [int(name) for name in os.listdir("/proc/self/fd")]
            print([number for number in sorted(listed) if os.path.exists(f"/proc/self/fd/{number}")])
