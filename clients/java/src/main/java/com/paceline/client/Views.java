package com.paceline.client;

import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/** What schedulers have listed of others, the last time that each was asked. Times are milliseconds. */
final class Views {
  /** Rounds of looks, one at each given scheduler, after which older words are dropped for newer ones. */
  private static final int ROUNDS = 3;

  private final Set<String> given;
  private final Map<String, View> views = new LinkedHashMap<>(); // by the address of the scheduler that listed them

  private record View(long at, List<Learned> entries) {}

  Views(Set<String> given) {
    this.given = given;
  }

  void put(String teller, List<Learned> entries, long now) {
    views.put(teller, new View(now, entries));
    age(now);
  }

  void drop(String teller, long now) {
    views.remove(teller);
    age(now);
  }

  int size() {
    return views.size();
  }

  /** Drops what was told long ago, once somebody has told more since. */
  private void age(long now) {
    long rounds = ROUNDS * KnownSchedulers.LOOK_EVERY_MS * given.size();
    long newest = views.values().stream().mapToLong(View::at).max().orElse(now);
    long oldest = Math.min(newest, now - rounds);
    views.values().removeIf(view -> view.at < oldest);
  }

  /**
   * What all have listed, by address: a scheduler is known while one of them lists it. The word of a given scheduler
   * counts more than that of a learned one, and a newer more than an older.
   */
  Map<String, Learned> joined() {
    Map<String, Learned> listed = new LinkedHashMap<>();
    views.entrySet().stream()
        .sorted(
            Comparator.comparing((Map.Entry<String, View> told) -> given.contains(told.getKey()))
                .thenComparing(told -> told.getValue().at))
        .forEach(told -> told.getValue().entries.forEach(one -> listed.put(one.address(), one)));
    return listed;
  }
}
