package com.paceline.client;

import com.google.protobuf.Any;
import com.google.protobuf.InvalidProtocolBufferException;
import com.paceline.client.details.ErrorInfo;
import com.paceline.client.details.RetryInfo;
import io.grpc.Metadata;
import io.grpc.Status;
import io.grpc.StatusRuntimeException;
import java.io.Serializable;
import java.time.Duration;
import java.util.Map;
import java.util.Optional;

/** A call that failed, with the details that the service attached. */
public final class PacelineException extends RuntimeException {
  private static final long serialVersionUID = 1;
  private static final Metadata.Key<byte[]> DETAILS =
      Metadata.Key.of("grpc-status-details-bin", Metadata.BINARY_BYTE_MARSHALLER);

  /** The longest hint that is taken. */
  private static final long MAX_SECONDS = 1L << 32;

  private final Status.Code code;
  private final Details details;
  private final boolean lost;

  private record Details(String reason, Map<String, String> metadata, Duration retryAfter)
      implements Serializable {
    static final Details NONE = new Details("", Map.of(), null);
  }

  private PacelineException(
      Status.Code code, String message, Details details, boolean lost, Throwable cause) {
    super(message, cause);
    this.code = code;
    this.details = details;
    this.lost = lost;
  }

  PacelineException(Status.Code code, String message) {
    this(code, message, Details.NONE, false, null);
  }

  /** The error for what gRPC threw. */
  static PacelineException of(StatusRuntimeException error) {
    Status status = error.getStatus();
    Details details = read(error.getTrailers());
    String message = Optional.ofNullable(status.getDescription()).orElse(status.getCode().name());
    return new PacelineException(codeOf(status, message, details), message, details, false, error);
  }

  /** The error for an answer that is incomplete, or makes no sense, though its status is OK. */
  static PacelineException incomplete(String message) {
    return new PacelineException(Status.Code.DATA_LOSS, message);
  }

  /** The error for a learned scheduler that serves another model than its entry in a directory says. */
  static PacelineException otherModel(String address) {
    String message = address + " is not what a directory says of it";
    return new PacelineException(
        Status.Code.UNAVAILABLE, message, new Details("OTHER_MODEL", Map.of(), null), false, null);
  }

  /** The error for a stream that was interrupted by {@code cause}, if not null, and can't be continued. */
  static PacelineException lost(String why, PacelineException cause) {
    Details of = cause == null ? Details.NONE : new Details(cause.reason(), cause.metadata(), null);
    return new PacelineException(Status.Code.UNAVAILABLE, interrupted(why), of, true, cause);
  }

  /** The error for a stream that was interrupted and whose continuation is refused for good. */
  static PacelineException refused(String why, PacelineException cause) {
    return new PacelineException(cause.code, interrupted(why), cause.details, false, cause);
  }

  /**
   * The status. RESOURCE_EXHAUSTED and UNAVAILABLE mean, unless {@link #isLost}, that nothing was emitted. DATA_LOSS:
   * the service reports success, but the answer is incomplete.
   */
  public Status.Code code() {
    return code;
  }

  /** The service's name of the cause, such as QUEUE_FULL; empty if it gave none. */
  public String reason() {
    return details.reason;
  }

  /** What the service added to the reason. */
  public Map<String, String> metadata() {
    return details.metadata;
  }

  /** When the same request may succeed; empty without a hint of the service. */
  public Optional<Duration> retryAfter() {
    return Optional.ofNullable(details.retryAfter);
  }

  /**
   * Whether a stream was interrupted after events had been received, and could not be continued. What was received is
   * valid but incomplete. The code is UNAVAILABLE.
   */
  public boolean isLost() {
    return lost;
  }

  /** Whether the same request may succeed later: nothing was emitted for it. */
  public boolean isRetryable() {
    return !lost && (code == Status.Code.RESOURCE_EXHAUSTED || code == Status.Code.UNAVAILABLE);
  }

  private static String interrupted(String why) {
    return "the stream was interrupted, and could not be continued: " + why;
  }

  private static Status.Code codeOf(Status status, String message, Details details) {
    return switch (status.getCode()) {
      // Paceline's services always give a reason. gRPC gives none when a server that stops cancels calls that it has not
      // begun, and when the client is closed.
      case CANCELLED -> details.reason.isEmpty() ? Status.Code.UNAVAILABLE : Status.Code.CANCELLED;
      // gRPC itself refuses such a message: waiting doesn't help.
      case RESOURCE_EXHAUSTED ->
          message.contains("larger than max") || message.contains("exceeds maximum size")
              ? Status.Code.INVALID_ARGUMENT
              : Status.Code.RESOURCE_EXHAUSTED;
      default -> status.getCode();
    };
  }

  private static Details read(Metadata trailers) {
    byte[] bytes = trailers == null ? null : trailers.get(DETAILS);
    if (bytes == null) {
      return Details.NONE;
    }
    ErrorInfo info = ErrorInfo.getDefaultInstance();
    Duration retryAfter = null;
    try {
      for (Any detail : com.paceline.client.details.Status.parseFrom(bytes).getDetailsList()) {
        if (detail.getTypeUrl().endsWith("/google.rpc.ErrorInfo")) {
          info = ErrorInfo.parseFrom(detail.getValue());
        } else if (detail.getTypeUrl().endsWith("/google.rpc.RetryInfo")) {
          var delay = RetryInfo.parseFrom(detail.getValue()).getRetryDelay();
          boolean isSane = delay.getSeconds() >= 0 && delay.getSeconds() <= MAX_SECONDS && delay.getNanos() >= 0;
          retryAfter = isSane ? Duration.ofSeconds(delay.getSeconds(), delay.getNanos()) : retryAfter;
        }
      }
    } catch (InvalidProtocolBufferException malformed) {
      return Details.NONE; // a peer that writes nonsense there still gave a code and a message
    }
    return new Details(info.getReason(), Map.copyOf(info.getMetadataMap()), retryAfter);
  }
}
