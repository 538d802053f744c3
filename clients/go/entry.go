package paceline

import (
	"net"
	"regexp"
	"strings"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// What is not of this form gRPC may take for a socket, a list of addresses or another target.
var hostPort = regexp.MustCompile(`^(\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9._-]+):[0-9]{1,5}$`)

// What gRPC takes for a scheme, though a port follows.
var noHost = regexp.MustCompile(`^(?i)(unix|unix-abstract|dns|ipv4|ipv6|vsock|xds|passthrough|google-c2p):`)

// learned is what an entry of a directory says of a scheduler.
type learned struct {
	startAt
	tlsName  string
	model    string // its fingerprint
	load     int    // running and waiting sequences
	drains   bool
	adapters map[string]bool
}

// startAt is one start of the scheduler at an address.
type startAt struct{ address, instance string }

func learnedOf(entry *schedulerv1.SchedulerEntry) learned {
	found := learned{
		startAt:  startAt{entry.GetAddress(), entry.GetInstance()},
		tlsName:  entry.GetTlsName(),
		model:    string(entry.GetModelFingerprint()),
		load:     int(entry.GetLoad().GetRunning()) + int(entry.GetLoad().GetWaiting()),
		drains:   entry.GetState() == schedulerv1.SchedulerState_SCHEDULER_STATE_DRAINING,
		adapters: map[string]bool{},
	}
	for _, name := range entry.GetAdapters() {
		found.adapters[name] = true
	}
	return found
}

// isLocal reports whether a given address can't be reached from another machine.
func isLocal(address string) bool {
	return strings.HasPrefix(address, "unix:") || strings.HasPrefix(address, "unix-abstract:") || isLoopback(address)
}

// isLoopback reports whether the host of host:port is this machine.
func isLoopback(address string) bool {
	host, _, err := net.SplitHostPort(address)
	return err == nil && (host == "localhost" || net.ParseIP(host).IsLoopback())
}
