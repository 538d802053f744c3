package paceline

import (
	"context"
	"crypto/sha256"
	"encoding/binary"
	"sort"
	"strings"
	"unicode/utf8"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

// Which of several schedulers gets a request: AFFINITY in scheduler.proto. Requests with the same beginning go to
// the same scheduler, whose prefix cache then has it.

const (
	affinityVersion  = "paceline-affinity-1"
	affinityBytes    = 1024 // of a text
	affinityTokenIDs = 256
)

type affinityKeyOf struct{}

// WithAffinityKey is a context for Generate and Complete: of several schedulers, requests with the same key go to the
// same one. Without a key, or with "", the beginning of the prompt decides.
func WithAffinityKey(ctx context.Context, key string) context.Context {
	return context.WithValue(ctx, affinityKeyOf{}, key)
}

// affinityKey is 32 bytes that requests with the same beginning share. own: the caller's key, in place of them.
func affinityKey(request *schedulerv1.GenerateRequest, own string) []byte {
	hash := sha256.New()
	str := func(text string) {
		binary.Write(hash, binary.LittleEndian, uint32(len(text)))
		hash.Write([]byte(text))
	}
	if own != "" {
		hash.Write([]byte(own))
		return hash.Sum(nil)
	}
	str(affinityVersion)
	str(request.GetModel())
	str(request.GetCacheSalt())
	switch prompt := request.GetPrompt().(type) {
	case *schedulerv1.GenerateRequest_Messages:
		hash.Write([]byte("m"))
		for _, message := range prompt.Messages.GetMessages() {
			content := message.Content
			if content == "" {
				parts := strings.Builder{}
				for _, part := range message.Parts {
					parts.WriteString(part.GetText())
				}
				content = parts.String()
			}
			str(message.Role)
			str(message.Name)
			str(content)
			if message.Role == "user" {
				break
			}
		}
	case *schedulerv1.GenerateRequest_Text:
		hash.Write([]byte("t"))
		end := len(prompt.Text)
		if end > affinityBytes {
			for end = affinityBytes; end > 0 && !utf8.RuneStart(prompt.Text[end]); end-- {
			}
		}
		str(prompt.Text[:end])
	case *schedulerv1.GenerateRequest_TokenIds:
		hash.Write([]byte("i"))
		ids := prompt.TokenIds.GetIds()
		if len(ids) > affinityTokenIDs {
			ids = ids[:affinityTokenIDs]
		}
		binary.Write(hash, binary.LittleEndian, ids)
	}
	return hash.Sum(nil)
}

// preference is the addresses, that of the scheduler with the highest weight first.
func preference(key []byte, addresses []string) []string {
	order := append([]string{}, addresses...)
	weights := map[string]uint64{}
	for _, address := range addresses {
		hash := sha256.Sum256(append(append([]byte{}, key...), address...))
		weights[address] = binary.BigEndian.Uint64(hash[:8])
	}
	sort.Slice(order, func(i, j int) bool {
		a, b := order[i], order[j]
		if weights[a] != weights[b] {
			return weights[a] > weights[b]
		}
		return a < b
	})
	return order
}

// choice is the first of the order whose load is within its share: the client's live calls there, and the sequences of
// all clients that the directory reports. If none is, the former alone count: one that says in vain that it has none
// gets no more than its share.
func choice(order []string, live map[string]int, reported func(string) int) string {
	ours := func(address string) int { return live[address] }
	least, most := share(order, ours), share(order, reported)
	fewer := filter(order, func(address string) bool { return ours(address) < least })
	for _, address := range fewer {
		if reported(address) < most {
			return address
		}
	}
	return fewer[0]
}

// share is 1.25 of the mean load with the new call, rounded up: who has as much gets no more.
func share(order []string, load func(string) int) int {
	sum := 1
	for _, address := range order {
		sum += load(address)
	}
	return (5*sum + 4*len(order) - 1) / (4 * len(order))
}
