//! Any answer in any pieces → the same tail and the same usage, and the usage that a sound answer states.

use warmroute::usage::{AnswerForm, AnswerTail, BytesPerToken, TAIL_BYTES, Usage};

use super::choices::{Choices, Seen, shown};
use super::json::{Node, any, shuffle, text};

/// Checks everything on the answer that the bytes stand for.
pub(crate) fn check(data: &[u8], seen: &mut Seen) {
    let mut choices = Choices::new(data);
    let mode = choices.byte();
    let form = [AnswerForm::Whole, AnswerForm::Events][choices.below(2)];
    let length_told = choices.below(4);
    let split_bytes = choices.take(16);
    let mut expected = None;
    let answer = if mode.is_multiple_of(2) {
        let (answer, usage) = answer(&mut choices, form);
        expected = Some(usage);
        answer
    } else {
        choices.rest().to_vec()
    };
    let content_length = match length_told {
        0 => None,
        1 => Some(answer.len() as u64),
        2 => Some(u64::from(split_bytes.first().copied().unwrap_or(0)) * 64),
        _ => Some(u64::MAX),
    };
    let told = || {
        format!(
            "{form:?}, length {content_length:?}, splits {split_bytes:?}, answer of {}",
            shown(&answer)
        )
    };
    let whole = tail_of(&answer, &[answer.len()], form, content_length);
    let pieces = tail_of(
        &answer,
        &Choices::new(split_bytes).splits(answer.len()),
        form,
        content_length,
    );
    assert_eq!(whole, pieces, "{}", told());
    let small: Vec<usize> = (0..=answer.len())
        .step_by(1 + split_bytes.len())
        .chain([answer.len()])
        .collect();
    assert_eq!(
        whole,
        tail_of(&answer, &small, form, content_length),
        "{}",
        told()
    );
    let usage = whole.usage();
    seen.note_if("answer beyond the tail", answer.len() > TAIL_BYTES);
    if let Some(usage) = usage {
        seen.note("usage");
        seen.note_if("cached tokens", usage.cached_tokens.is_some());
        assert!(usage.prompt_tokens > 0, "{}", told());
        assert!(
            usage
                .cached_tokens
                .is_none_or(|cached| cached <= usage.prompt_tokens),
            "{}",
            told()
        );
    }
    if content_length.is_none_or(|length| length <= answer.len() as u64) && answer.len() <= TAIL_BYTES {
        let own = tail_of(&answer, &[answer.len()], form, None);
        assert_eq!(own.usage(), usage, "{}", told());
        if let Some(expected) = expected {
            assert_eq!(usage, expected, "{}", told());
            seen.note_if("usage as stated", expected.is_some());
        }
    }
    check_mean(&mut Choices::new(data), seen);
}

/// The tail after pieces that end at `ends`, handled as the shell does.
fn tail_of(answer: &[u8], ends: &[usize], form: AnswerForm, content_length: Option<u64>) -> AnswerTail {
    let mut tail = AnswerTail::new(form, content_length);
    let mut start = 0;
    for end in ends {
        let piece = &answer[start..*end];
        let wanted = tail.pass(piece.len());
        assert!(
            wanted <= piece.len().min(TAIL_BYTES),
            "{wanted} of {}",
            piece.len()
        );
        if wanted > 0 {
            tail.push(&piece[piece.len() - wanted..]);
        }
        start = *end;
    }
    tail
}

/// Whatever is learned, the mean stays within its documented bounds.
fn check_mean(choices: &mut Choices<'_>, seen: &mut Seen) {
    let mut mean = BytesPerToken::new(1 + u32::from(choices.byte() % 16));
    for _ in 0..32 {
        let (bytes, tokens) = (choices.odd_u32(), choices.odd_u32());
        let before = mean.millibytes();
        mean.learn(bytes, tokens);
        let after = mean.millibytes();
        assert!(
            (500..=16_000).contains(&after),
            "{after} after {bytes} bytes of {tokens} tokens"
        );
        seen.note_if("mean moved", before != after);
    }
}

/// An answer with one usage object at its end, and what it states.
fn answer(choices: &mut Choices<'_>, form: AnswerForm) -> (Vec<u8>, Option<Usage>) {
    let count = |choices: &mut Choices<'_>| u32::from(choices.u16());
    let (prompt, cached, created) = (count(choices), count(choices), count(choices));
    let extra = ("completion_tokens".to_owned(), Node::number(count(choices)));
    let number = |name: &str, value: u32| (name.to_owned(), Node::number(value));
    let details = |name: &str| {
        (
            name.to_owned(),
            Node::object([
                ("audio_tokens", Node::number(7)),
                ("cached_tokens", Node::number(cached)),
            ]),
        )
    };
    let (mut fields, prompt_tokens, is_cached_told) = match choices.below(5) {
        0 => (
            vec![number("prompt_tokens", prompt), details("prompt_tokens_details")],
            prompt,
            true,
        ),
        1 => (
            vec![number("input_tokens", prompt), details("input_tokens_details")],
            prompt,
            true,
        ),
        2 => (
            vec![
                number("input_tokens", prompt),
                number("cache_read_input_tokens", cached),
                number("cache_creation_input_tokens", created),
            ],
            prompt + cached + created,
            true,
        ),
        3 => (
            vec![
                number("prompt_tokens", prompt),
                ("prompt_tokens_details".to_owned(), Node::Null),
            ],
            prompt,
            false,
        ),
        _ => (
            vec![number("prompt_tokens", prompt), number("cached_tokens", cached)],
            prompt,
            true,
        ),
    };
    fields.push(extra);
    shuffle(&mut fields, choices);
    let usage = Node::Object(fields);
    let name = choices.pick(&["usage", "meta_info"]);
    let before = (0..choices.below(4)).map(|_| ("choices".to_owned(), Node::Text(text(choices))));
    let mut whole: Vec<(String, Node)> = before.collect();
    whole.push((name.to_owned(), usage));
    if choices.one_in(3) {
        whole.push(("prompt_logprobs".to_owned(), Node::Null));
    }
    if choices.one_in(8) {
        whole.push((
            "kv_transfer_params".to_owned(),
            sound(any(choices, &["id", "choices"], 2)),
        ));
    }
    let object = Node::Object(whole).plain();
    let stated = (prompt_tokens > 0).then_some(Usage {
        prompt_tokens,
        cached_tokens: is_cached_told.then_some(cached.min(prompt_tokens)),
    });
    let answer = match form {
        AnswerForm::Whole => object,
        AnswerForm::Events => {
            format!("data: {{\"choices\":[]}}\n\ndata: {object}\n\ndata: [DONE]\n\n")
        }
    };
    (answer.into_bytes(), stated)
}

/// The value without pieces that are no JSON.
fn sound(node: Node) -> Node {
    match node {
        Node::Verbatim(_) => Node::Null,
        Node::List(items) => Node::List(items.into_iter().map(sound).collect()),
        Node::Object(fields) => Node::Object(
            fields
                .into_iter()
                .map(|(key, value)| (key, sound(value)))
                .collect(),
        ),
        other => other,
    }
}
