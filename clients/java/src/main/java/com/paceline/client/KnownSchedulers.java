package com.paceline.client;

import com.google.protobuf.ByteString;
import com.paceline.client.Learned.Start;
import com.paceline.scheduler.v1.SchedulerEntry;
import java.util.ArrayList;
import java.util.Collections;
import java.util.Comparator;
import java.util.HashMap;
import java.util.HashSet;
import java.util.LinkedHashMap;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import java.util.function.Predicate;
import java.util.stream.Collectors;

/**
 * The addresses given by the user, which stay, and those learned from the directories of schedulers. No I/O: times are
 * milliseconds. Safe for concurrent use.
 *
 * <p>Entries are claims of whoever wrote them: here is decided which get a token. A learned address is used only for a
 * model of the same name as that of the scheduler which listed it, and for another fingerprint only once none of the
 * present one takes calls ({@link Schedulers#foreign}). With SAFE it is used over TLS, by the authority that the client
 * trusts already and under the name that the entry gives; or without TLS on loopback, if the scheduler which listed it
 * is on this machine too. With ANY also without TLS elsewhere, if the client has no authority. A scheduler is known
 * once, however many addresses it has.
 */
final class KnownSchedulers {
  /** Between two looks into a directory, while calls begin or streams run. */
  static final long LOOK_EVERY_MS = 10_000;

  /** From a look that failed to the next one, at another scheduler. */
  private static final long LOOK_AGAIN_MS = 1_000;

  /** For so long a scheduler that has said that it has no directory is not asked again. */
  static final long NO_DIRECTORY_MS = 300_000;

  /** Entries of one look that are read: as many as a directory has at most. */
  static final int MAX_ENTRIES = 10_000;

  /** Schedulers that a client learns of, at most. */
  static final int MAX_LEARNED = 1024;

  private static final int MAX_LIARS = 1024;

  private final Set<String> given;
  private final boolean hasTls;
  private final DirectoryUse use;
  private final Views views;
  private final Map<String, Learned> own = new HashMap<>(); // by given address: what it says of itself
  private Map<String, Learned> learned = new LinkedHashMap<>(); // by address
  private final Set<Start> liars = new LinkedHashSet<>();
  private final Set<Start> checked = new HashSet<>(); // those that serve the model
  private final Map<String, Long> without = new HashMap<>(); // by address: until when it is not asked for a directory
  private final Map<String, Long> refused = new HashMap<>(); // by caller: until when it does not look
  private final Set<String> silent = new HashSet<>(); // those at which looks failed since the last one that did not
  private long nextLook = Long.MIN_VALUE;
  private int turn;
  private ByteString model = ByteString.EMPTY; // the fingerprint that new calls get
  private boolean looked;

  KnownSchedulers(List<String> given, boolean hasTls, DirectoryUse use) {
    this.given = new LinkedHashSet<>(given);
    this.hasTls = hasTls;
    this.use = use;
    views = new Views(this.given);
    looked = use == DirectoryUse.OFF;
  }

  /** Whether it is time for a look into a directory; if so, the time of the next one is set. */
  synchronized boolean isTimeToLook(long now, String caller) {
    if (use == DirectoryUse.OFF || now < nextLook || now < refused.getOrDefault(caller, now)) {
      return false;
    }
    nextLook = now + LOOK_EVERY_MS;
    return true;
  }

  /** Whether a look has ended, well or not. */
  synchronized boolean hasLooked() {
    return looked;
  }

  /**
   * Whom to ask: a given one that is up, in turn; else a learned one; else one that is down. One at which a look has
   * just failed comes last, though it may count as up again by now.
   */
  synchronized String teller(long now, Predicate<String> isDown) {
    List<String> asked = new ArrayList<>(addresses());
    asked.removeIf(one -> without.getOrDefault(one, now) > now);
    if (asked.isEmpty()) {
      asked.addAll(given);
    }
    turn++;
    Collections.rotate(asked, -turn);
    return Collections.min(
        asked,
        Comparator.<String, Boolean>comparing(silent::contains)
            .thenComparing(isDown::test)
            .thenComparing(this::isForeign)
            .thenComparing(one -> !given.contains(one)));
  }

  /** Records all entries of the directory of the scheduler at {@code teller}. */
  synchronized void saw(String teller, List<SchedulerEntry> entries, long now) {
    looked = true;
    silent.clear();
    List<SchedulerEntry> read = entries.subList(0, Math.min(entries.size(), MAX_ENTRIES));
    Optional<SchedulerEntry> found = read.stream().filter(entry -> entry.getWrittenBy().isEmpty()).findFirst();
    if (found.isEmpty()) {
      return;
    }
    SchedulerEntry itself = found.get();
    ByteString served = itself.getModelFingerprint();
    if (given.contains(teller)) {
      own.put(teller, Learned.of(itself));
    } else if (!served.isEmpty() && !isWhatItSays(teller, served)) {
      distrust(teller);
      return;
    }
    if (served.isEmpty()) {
      return; // it is loading: what it listed before stays
    }
    model = served;
    views.put(teller, read.stream().filter(one -> isUsed(one, itself, teller)).map(Learned::of).toList(), now);
    join();
  }

  /** Records that the directory of {@code teller} could not be had: what it listed is kept if it is all. */
  synchronized void lost(String teller, long now) {
    looked = true;
    silent.add(teller);
    if (silent.containsAll(addresses())) {
      silent.clear();
      nextLook = now + LOOK_EVERY_MS;
    } else {
      nextLook = now + LOOK_AGAIN_MS;
    }
    if (views.size() > 1) {
      views.drop(teller, now);
      join();
    }
  }

  /** Records that a scheduler did not let this caller look: others may look at once. */
  synchronized void refused(String caller, long now) {
    looked = true;
    nextLook = Math.min(nextLook, now);
    refused.values().removeIf(until -> until <= now);
    refused.put(caller, now + LOOK_EVERY_MS);
  }

  /** Records that the scheduler at {@code teller} has no directory. */
  synchronized void hasNone(String teller, long now) {
    looked = true;
    views.drop(teller, now);
    join();
    List<String> known = addresses();
    without.keySet().retainAll(known);
    without.put(teller, now + NO_DIRECTORY_MS);
    nextLook = without.size() < known.size() ? now : Collections.min(without.values());
  }

  /**
   * Records that what is at a learned address is not what its entry says: it is used no more, until it is another start
   * of a scheduler.
   */
  synchronized void distrust(String address) {
    Learned one = learned.get(address);
    if (one != null) {
      liars.add(one.start());
      if (liars.size() > MAX_LIARS) {
        liars.remove(liars.iterator().next());
      }
      join();
    }
  }

  /** All that are used: the given ones, then the learned ones. */
  synchronized List<String> addresses() {
    List<String> all = new ArrayList<>(given);
    all.addAll(learned.keySet());
    return all;
  }

  /** Those that are known now. */
  synchronized Schedulers present() {
    Map<String, Learned> entries = new HashMap<>(own);
    entries.putAll(learned);
    Set<String> foreign = learned.keySet().stream().filter(this::isForeign).collect(Collectors.toSet());
    return new Schedulers(addresses(), entries, foreign);
  }

  /** The name of a learned scheduler's certificate, empty without TLS. No value: its address is not known, or no more. */
  synchronized Optional<String> tlsName(String address) {
    return Optional.ofNullable(learned.get(address)).map(Learned::tlsName);
  }

  /** Whether a scheduler that reports this model may be the one of the entry; given ones always are. */
  synchronized boolean isWhatItSays(String address, ByteString fingerprint) {
    if (given.contains(address)) {
      return true;
    }
    Learned one = learned.get(address);
    if (one == null || !one.model().equals(fingerprint)) {
      return false;
    }
    checked.add(one.start());
    return true;
  }

  /** Whether it has reported the model of its entry since its start, or is a given one. */
  synchronized boolean isChecked(String address) {
    Learned one = learned.get(address);
    return given.contains(address) || one != null && checked.contains(one.start());
  }

  private boolean isForeign(String address) {
    Learned one = learned.get(address);
    return one != null && !one.model().equals(model);
  }

  private boolean isUsed(SchedulerEntry entry, SchedulerEntry itself, String teller) {
    return entry.getModel().equals(itself.getModel())
        && !entry.getModelFingerprint().isEmpty()
        && !entry.getInstance().isEmpty()
        && (!entry.getInstance().equals(itself.getInstance()) || entry.getAddress().equals(teller))
        && mayGetAToken(entry, teller);
  }

  private boolean mayGetAToken(SchedulerEntry entry, String teller) {
    if (!Learned.isHostPort(entry.getAddress())) {
      return false;
    }
    if (hasTls || !entry.getTlsName().isEmpty()) {
      return hasTls && !entry.getTlsName().isEmpty(); // it speaks TLS, and the client knows an authority
    }
    return Learned.isLoopback(entry.getAddress()) ? Learned.isLocal(teller) : use == DirectoryUse.ANY;
  }

  /** Joins what all have listed. */
  private void join() {
    Set<String> instances = own.values().stream().map(one -> one.start().instance()).collect(Collectors.toSet());
    learned =
        views.joined().values().stream()
            .filter(one -> !given.contains(one.address()) && !liars.contains(one.start()))
            .sorted(
                Comparator.<Learned, Boolean>comparing(one -> !one.model().equals(model))
                    .thenComparing(Learned::address))
            .filter(one -> instances.add(one.start().instance()))
            .limit(MAX_LEARNED)
            .collect(Collectors.toMap(Learned::address, one -> one, (one, same) -> one, LinkedHashMap::new));
    checked.retainAll(learned.values().stream().map(Learned::start).collect(Collectors.toSet()));
  }
}
