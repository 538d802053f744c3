package com.paceline.client;

import java.util.List;
import java.util.Map;
import java.util.Set;

/**
 * Those that calls use at one time.
 *
 * @param addresses the given ones, then the learned ones
 * @param entries by address, of those that a directory has
 * @param foreign learned ones with another model of the same name, as in the middle of a fleet's update
 */
record Schedulers(List<String> addresses, Map<String, Learned> entries, Set<String> foreign) {
  /** Of which nothing is known yet. */
  static Schedulers of(List<String> addresses) {
    return new Schedulers(addresses, Map.of(), Set.of());
  }
}
