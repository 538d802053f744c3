package paceline

import (
	"math"

	"github.com/paceline/paceline/clients/go/schedulerv1"
)

const (
	// textBytesPerToken are of text, reasoning and tool calls, on average over a completion: see Delta.
	textBytesPerToken = 4096
	// unannouncedTokens are those of a completion if neither the request nor the scheduler says how many it may have.
	unannouncedTokens = 1 << 20
	// unaskedTop are the likeliest tokens in each place, if the request asks for fewer.
	unaskedTop = 32
)

// bounds are how much a stream may bring: a scheduler that sends more than it announced is wrong, or lies.
type bounds struct {
	maxTokens int // of a completion
	top       int // likeliest tokens in each place
}

func boundsOf(request *schedulerv1.GenerateRequest, started *schedulerv1.Started) bounds {
	found := bounds{maxTokens: unannouncedTokens, top: unaskedTop}
	asked, announced := request.GetStop().GetMaxTokens(), started.GetMaxTokens()
	if asked == 0 || announced != 0 && announced < asked {
		asked = announced
	}
	if asked != 0 {
		found.maxTokens = int(asked)
	}
	if top := request.GetSampling().GetLogprobs(); top > unaskedTop {
		found.top = int(top)
	}
	return found
}

// check checks a delta, after which its completion has so many tokens and bytes of text.
func (b bounds) check(delta *schedulerv1.Delta, tokens, textBytes int) error {
	if tokens > b.maxTokens {
		return incomplete("a completion has more than the %d tokens that were announced", b.maxTokens)
	}
	if textBytes > textBytesPerToken && textBytes > textBytesPerToken*tokens {
		return incomplete("a completion has %d bytes of text in %d tokens, more than %d a token",
			textBytes, tokens, textBytesPerToken)
	}
	if len(delta.Logprobs) > len(delta.TokenIds) {
		return incomplete("%d logprobs of %d tokens", len(delta.Logprobs), len(delta.TokenIds))
	}
	for _, one := range delta.Logprobs {
		if len(one.TopIds) != len(one.TopLogprobs) || len(one.TopIds) > b.top {
			return incomplete("%d likeliest tokens in one place, with %d logprobs", len(one.TopIds), len(one.TopLogprobs))
		}
	}
	return checkNumbers(delta.Logprobs)
}

func checkNumbers(logprobs []*schedulerv1.TokenLogprobs) error {
	for _, one := range logprobs {
		for _, logprob := range append([]float32{one.Logprob}, one.TopLogprobs...) {
			if math.IsNaN(float64(logprob)) {
				return incomplete("a token's logprob is not a number")
			}
		}
	}
	return nil
}
