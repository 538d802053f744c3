package com.paceline.client;

import com.google.protobuf.ByteString;
import com.paceline.scheduler.v1.SchedulerEntry;
import com.paceline.scheduler.v1.SchedulerState;
import java.net.InetAddress;
import java.net.UnknownHostException;
import java.util.Set;
import java.util.regex.Pattern;

/**
 * What an entry of a directory says of a scheduler.
 *
 * @param tlsName the name of its certificate; empty: it speaks without TLS
 * @param model its model's fingerprint
 * @param load running and waiting sequences
 */
record Learned(
    Start start, String tlsName, ByteString model, long load, boolean drains, Set<String> adapters) {
  /** What is not of this form gRPC may take for a socket, a list of addresses or another target. */
  private static final Pattern HOST_PORT = Pattern.compile("(\\[[0-9A-Fa-f:.]+\\]|[A-Za-z0-9._-]+):[0-9]{1,5}");

  /** What gRPC takes for a scheme, though a port follows. */
  private static final Pattern NO_HOST =
      Pattern.compile(
          "(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds|passthrough|google-c2p):", Pattern.CASE_INSENSITIVE);

  private static final Pattern IPV4_LOOPBACK =
      Pattern.compile("127(\\.(25[0-5]|2[0-4][0-9]|1[0-9][0-9]|[1-9]?[0-9])){3}");

  /** One start of the scheduler at an address. */
  record Start(String address, String instance) {}

  static Learned of(SchedulerEntry entry) {
    return new Learned(
        new Start(entry.getAddress(), entry.getInstance()),
        entry.getTlsName(),
        entry.getModelFingerprint(),
        Integer.toUnsignedLong(entry.getLoad().getRunning()) + Integer.toUnsignedLong(entry.getLoad().getWaiting()),
        entry.getState() == SchedulerState.SCHEDULER_STATE_DRAINING,
        Set.copyOf(entry.getAdaptersList()));
  }

  String address() {
    return start.address();
  }

  /** Whether an address of a directory is one of a host and a port. */
  static boolean isHostPort(String address) {
    return HOST_PORT.matcher(address).matches() && !NO_HOST.matcher(address).lookingAt();
  }

  /** Whether a given address can't be reached from another machine. */
  static boolean isLocal(String address) {
    return address.startsWith("unix:") || address.startsWith("unix-abstract:") || isLoopback(address);
  }

  /** Whether the host of host:port is this machine. */
  static boolean isLoopback(String address) {
    String host = address.substring(0, Math.max(address.lastIndexOf(':'), 0));
    if (!host.startsWith("[")) {
      return host.equals("localhost") || IPV4_LOOPBACK.matcher(host).matches();
    }
    try {
      return InetAddress.getByName(host).isLoopbackAddress(); // in brackets it is no name to resolve
    } catch (UnknownHostException malformed) {
      return false;
    }
  }
}
