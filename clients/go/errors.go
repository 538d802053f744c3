package paceline

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/proto"

	"github.com/paceline/paceline/clients/go/internal/details"
)

// Error is a call that failed, with the details that the service attached. Find it with errors.As.
type Error struct {
	// Code is the status. RESOURCE_EXHAUSTED and UNAVAILABLE mean, unless Lost, that nothing was emitted.
	// DATA_LOSS: the service reports success, but the answer is incomplete.
	Code codes.Code
	// Message names the field and the limit where a parameter is at fault.
	Message string
	// Reason is the service's name of the cause, such as QUEUE_FULL; "" if it gave none.
	Reason string
	// Metadata is what the service added to Reason.
	Metadata map[string]string
	// RetryAfter is the time after which the same request may succeed; 0 if the service gave no hint.
	RetryAfter time.Duration
	// Lost: a stream was interrupted after events had been received, and could not be continued. What was
	// received is valid but incomplete. Code is UNAVAILABLE.
	Lost bool

	cause error
}

// Error is the code and the message.
func (e *Error) Error() string { return fmt.Sprintf("%s: %s", e.Code, e.Message) }

// Unwrap is the error of gRPC or of the context, if there is one.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus makes status.Code and status.FromError work with an *Error.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// Retryable reports whether the same request may succeed later: nothing was emitted for it.
func (e *Error) Retryable() bool {
	return !e.Lost && (e.Code == codes.ResourceExhausted || e.Code == codes.Unavailable)
}

// readDetails reads google.rpc's messages as those of package details: which module has google.rpc's own depends
// on the version of gRPC, and a program may have only one of them.
func (e *Error) readDetails(reported *status.Status) {
	for _, detail := range reported.Proto().GetDetails() {
		switch _, name, _ := strings.Cut(detail.GetTypeUrl(), "/"); name {
		case "google.rpc.ErrorInfo":
			info := &details.ErrorInfo{}
			if proto.Unmarshal(detail.GetValue(), info) == nil {
				e.Reason, e.Metadata = info.Reason, info.Metadata
			}
		case "google.rpc.RetryInfo":
			retry := &details.RetryInfo{}
			if proto.Unmarshal(detail.GetValue(), retry) == nil {
				delay := retry.GetRetryDelay()
				if seconds := delay.GetSeconds(); seconds >= 0 && seconds <= maxSeconds && delay.GetNanos() >= 0 {
					e.RetryAfter = time.Duration(seconds)*time.Second + time.Duration(delay.GetNanos())
				}
			}
		}
	}
}

// maxSeconds are the most of a hint that is taken; a time.Duration has room for 292 years.
const maxSeconds = 1 << 32

func incomplete(format string, values ...interface{}) *Error {
	return &Error{Code: codes.DataLoss, Message: fmt.Sprintf(format, values...)}
}

// fromRPC is the *Error for what gRPC returned for a call with this context.
func fromRPC(ctx context.Context, err error) *Error {
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	failure := &Error{Code: codes.Unknown, Message: err.Error(), cause: err}
	if reported, ok := status.FromError(err); ok {
		failure.Code, failure.Message = reported.Code(), reported.Message()
		failure.readDetails(reported)
	}
	if failure.Reason != "" {
		return failure
	}
	if ended := ctx.Err(); ended != nil && failure.Code != codes.OK {
		// The caller's own doing, whatever gRPC made of it.
		code := codes.Canceled
		if errors.Is(ended, context.DeadlineExceeded) {
			code = codes.DeadlineExceeded
		}
		return &Error{Code: code, Message: ended.Error(), cause: ended}
	}
	switch {
	case failure.Code == codes.Canceled:
		// Paceline's services always give a reason. gRPC gives none when a server that stops cancels calls
		// that it has not begun, and when the client is closed.
		failure.Code = codes.Unavailable
	case failure.Code == codes.ResourceExhausted && strings.Contains(failure.Message, "larger than max"):
		failure.Code = codes.InvalidArgument // gRPC itself refuses such a message: waiting doesn't help
	}
	return failure
}
