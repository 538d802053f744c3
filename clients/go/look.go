package paceline

import (
	"context"
	"io"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

const (
	lookTimeout = 5 * time.Second
	// Bytes of one look's answer, each message counted as messageBytes more than it has.
	maxLookBytes = 16 << 20
	messageBytes = 64 << 10
	// A message has 128 KiB at most. Many small entries take far more memory than bytes.
	maxLookMessage = 256 << 10

	// otherModel is the reason of the client's own error for a learned scheduler that serves another model than its
	// entry says.
	otherModel = "OTHER_MODEL"
)

// lookInTime looks into a directory beside the calls, if it is time and no look is in progress.
func (c *connections) lookInTime() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	if c.closed || !c.known.isTimeToLook(time.Now(), c.settings.token) {
		return
	}
	select {
	case <-c.lastLook:
		ended := make(chan struct{})
		c.lastLook = ended
		go func() {
			defer close(ended)
			c.look()
		}()
	default:
	}
}

// lookFirst looks before a call to all schedulers, if none has: for at most half of the time that the call has.
func (c *connections) lookFirst(ctx context.Context) {
	c.lookInTime()
	if c.known.hasLooked() {
		return
	}
	limit := lookTimeout
	if deadline, ok := ctx.Deadline(); ok && time.Until(deadline)/2 < limit {
		limit = time.Until(deadline) / 2
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	c.mutex.Lock()
	last := c.lastLook
	c.mutex.Unlock()
	select {
	case <-last:
	case <-ctx.Done():
	}
}

// look looks into the directory of one scheduler. Its call ends with its connection.
func (c *connections) look() {
	now := time.Now()
	teller := c.known.teller(now, c.rotation.isDownAt)
	c.mutex.Lock()
	one, err := c.at(teller)
	c.mutex.Unlock()
	if one == nil || err != nil {
		return
	}
	ctx, cancel := context.WithTimeout(context.Background(), lookTimeout)
	defer cancel()
	entries, err := listed(ctx, one)
	if err == nil {
		c.known.saw(teller, entries, now)
	} else {
		switch fromRPC(ctx, err).Code {
		case codes.Unimplemented:
			c.known.hasNone(teller, now)
		case codes.Unavailable, codes.DeadlineExceeded:
			c.known.lost(teller, now)
			c.rotation.markDown(teller, time.Now())
		default:
			c.known.refused(c.settings.token, now)
		}
	}
	c.useKnown()
}

// listed is all entries of a scheduler's directory; nil if it does not end.
func listed(ctx context.Context, scheduler schedulerv1.SchedulerServiceClient) ([]*schedulerv1.SchedulerEntry, error) {
	watch, err := scheduler.WatchSchedulers(ctx, &schedulerv1.WatchSchedulersRequest{},
		grpc.MaxCallRecvMsgSize(maxLookMessage))
	if err != nil {
		return nil, err
	}
	var entries []*schedulerv1.SchedulerEntry
	for size := 0; size < maxLookBytes; {
		message, err := watch.Recv()
		if err == io.EOF {
			return nil, nil
		}
		if err != nil {
			return nil, err
		}
		if entries = append(entries, message.Entries...); len(entries) > maxEntries {
			entries = entries[:maxEntries]
		}
		if message.Complete {
			return entries, nil
		}
		size += messageBytes + proto.Size(message)
	}
	return nil, nil
}

// checkStarted checks a stream's message: what begins at a learned address is of the model that its entry says.
func (c *connections) checkStarted(address string, message *schedulerv1.GenerateResponse) error {
	c.lookInTime() // a client that begins no calls meanwhile looks too
	if started := message.GetStarted(); started != nil {
		return c.checkModel(address, started.ModelFingerprint)
	}
	return nil
}

// check asks a learned scheduler for its model before its first unary call: replies do not say which model answered.
func (c *connections) check(ctx context.Context, address string, scheduler *connection) error {
	if c.known.isChecked(address) {
		return nil
	}
	served, err := scheduler.GetModelInfo(ctx, &schedulerv1.GetModelInfoRequest{})
	if err != nil {
		return err
	}
	return c.checkModel(address, served.ModelFingerprint)
}

func (c *connections) checkModel(address string, fingerprint []byte) error {
	if c.known.isWhatItSays(address, string(fingerprint)) {
		return nil
	}
	c.known.distrust(address)
	c.useKnown()
	return &Error{
		Code: codes.Unavailable, Message: address + " is not what a directory says of it", Reason: otherModel,
	}
}
