package paceline

import (
	"context"
	"sync"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// connections are those of a client to its schedulers: to given ones from the beginning, to learned ones from their
// first use until they are known no more and no call is there. Safe for concurrent use.
type connections struct {
	settings settings
	known    *knownSchedulers
	rotation *rotation
	mutex    sync.Mutex // nothing is closed between its choice and the count of its call
	open     map[string]*connection
	closed   bool
	lastLook chan struct{} // closed: it has ended
}

// connection is one to a scheduler.
type connection struct {
	schedulerv1.SchedulerServiceClient
	*grpc.ClientConn
}

func newConnections(given []string, chosen settings) (*connections, error) {
	made := &connections{
		settings: chosen,
		known:    newKnownSchedulers(given, chosen.tls != nil, chosen.directory),
		rotation: newRotation(given),
		open:     map[string]*connection{},
		lastLook: make(chan struct{}),
	}
	close(made.lastLook)
	for _, address := range given {
		if err := made.dial(address, address, chosen.dialOptions()); err != nil {
			made.close()
			return nil, err
		}
	}
	return made, nil
}

func (c *connections) dial(address, target string, options []grpc.DialOption) error {
	dialed, err := grpc.Dial(target, options...)
	if err == nil {
		c.open[address] = &connection{schedulerv1.NewSchedulerServiceClient(dialed), dialed}
	}
	return err
}

func (c *connections) close() error {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.closed = true
	var failure error
	for _, one := range c.open {
		if err := one.Close(); err != nil && failure == nil {
			failure = err
		}
	}
	c.open = map[string]*connection{}
	return failure
}

func (c *connections) isClosed() bool {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	return c.closed
}

// at is the connection to an address, opened if there is none; nil: the address is known no more. Called with the mutex
// held.
func (c *connections) at(address string) (*connection, error) {
	if c.closed {
		return nil, grpc.ErrClientConnClosing
	}
	tlsName, isLearned := c.known.tlsName(address)
	if !isLearned && !c.rotation.given[address] {
		return nil, nil
	}
	if c.open[address] == nil {
		// As it is: no part of an address of a directory is a scheme.
		if err := c.dial(address, "passthrough:///"+address, c.settings.learnedOptions(tlsName)); err != nil {
			return nil, &Error{Code: codes.Unavailable, Message: "connection error: " + err.Error(), cause: err}
		}
	}
	return c.open[address], nil
}

// begin is the connection of the current attempt, whose scheduler is still known, and the attempt's context: until it is
// canceled, the attempt counts as a call there.
func (c *connections) begin(ctx context.Context, attempts *attempts) (
	*connection, context.Context, context.CancelFunc, error,
) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	found, err := c.at(attempts.address)
	for found == nil && err == nil {
		c.rotation.use(c.known.present()) // or it may be chosen again
		attempts.skip(time.Now())
		found, err = c.at(attempts.address)
	}
	if err != nil {
		return nil, nil, nil, err
	}
	attempt, cancel := context.WithCancel(attempts.metadata(ctx))
	c.count(attempt, attempts.address)
	return found, attempt, cancel, nil
}

// all are the connections to all known schedulers, at each of which a call counts until the context is canceled.
func (c *connections) all(ctx context.Context) ([]*connection, error) {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	var found []*connection
	for _, address := range c.known.present().addresses {
		one, err := c.at(address)
		if err != nil {
			return nil, err
		}
		if one != nil {
			found = append(found, one)
			c.count(ctx, address)
		}
	}
	return found, nil
}

// count counts a call at an address until the context is canceled.
func (c *connections) count(ctx context.Context, address string) {
	c.rotation.began(address)
	go func() {
		<-ctx.Done()
		c.mutex.Lock()
		defer c.mutex.Unlock()
		c.rotation.ended(address)
		c.closeUnused(address)
	}()
}

// useKnown lets calls use the schedulers that are known now, and closes the connections to others that no call uses.
func (c *connections) useKnown() {
	c.mutex.Lock()
	defer c.mutex.Unlock()
	c.rotation.use(c.known.present())
	for address := range c.open {
		c.closeUnused(address)
	}
}

func (c *connections) closeUnused(address string) {
	if one := c.open[address]; one != nil && c.rotation.isUnused(address) {
		delete(c.open, address)
		one.Close()
	}
}
