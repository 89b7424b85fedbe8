//! A body that ends at the buffer limit → the head of the string in which it ends.
//!
//! In: bytes that are valid JSON up to their end. Out: the text of the open string without a partial escape, surrogate
//! pair or UTF-8 sequence. The parser never delivers a partial string, and a long system prompt would yield nothing.

use std::borrow::Cow;

/// The text of the string that is open at the end of `body`; `None` where none is or where it is not valid.
pub(crate) fn open_text(body: &[u8]) -> Option<Cow<'_, str>> {
    let tail = body.get(open_string_at(body)?..)?;
    let whole = tail.get(..whole_escapes_bytes(tail))?;
    let text = match std::str::from_utf8(whole) {
        Ok(text) => text,
        Err(error) if error.error_len().is_none() => {
            std::str::from_utf8(whole.get(..error.valid_up_to())?).ok()?
        }
        Err(_) => return None,
    };
    if !text.contains('\\') {
        return text
            .bytes()
            .all(|byte| byte >= 0x20)
            .then_some(Cow::Borrowed(text));
    }
    let mut quoted = String::with_capacity(text.len() + 2);
    quoted.push('"');
    quoted.push_str(text);
    quoted.push('"');
    serde_json::from_str::<String>(&quoted).ok().map(Cow::Owned)
}

/// True where `body` may end inside a number, which a parser then calls invalid rather than incomplete.
pub(crate) fn ends_in_number(body: &[u8]) -> bool {
    body.last()
        .is_some_and(|byte| byte.is_ascii_digit() || matches!(byte, b'-' | b'+' | b'.' | b'e' | b'E'))
}

/// Where the string begins that is open at the end.
fn open_string_at(body: &[u8]) -> Option<usize> {
    let mut open_at = None;
    let mut at = 0;
    while let Some(found) = body.get(at..).and_then(|rest| memchr::memchr2(b'"', b'\\', rest)) {
        let mark_at = at + found;
        at = mark_at + 1;
        if body.get(mark_at) == Some(&b'\\') {
            at += 1;
        } else {
            open_at = if open_at.is_some() { None } else { Some(at) };
        }
    }
    open_at
}

/// Length of `tail` up to the first escape that is not whole.
fn whole_escapes_bytes(tail: &[u8]) -> usize {
    let mut at = 0;
    while let Some(found) = tail.get(at..).and_then(|rest| memchr::memchr(b'\\', rest)) {
        let escape_at = at + found;
        let Some(escape_bytes) = tail.get(escape_at..).and_then(escape_bytes) else {
            return escape_at;
        };
        at = escape_at + escape_bytes;
    }
    tail.len()
}

/// Length of the escape at the start, a surrogate pair counting as one; `None` where it is cut.
fn escape_bytes(escape: &[u8]) -> Option<usize> {
    if escape.get(1)? != &b'u' {
        return Some(2);
    }
    let unit = escape.get(2..6)?;
    let is_high_surrogate = matches!(unit, [b'd' | b'D', b'8' | b'9' | b'a' | b'b' | b'A' | b'B', ..]);
    if is_high_surrogate {
        escape.get(..12)?;
        return Some(12);
    }
    Some(6)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn partial_escapes_and_characters_are_dropped() {
        for (body, want) in [
            (&br#"{"a":"plain"#[..], Some("plain")),
            (br#"{"a":"b","c":""#, Some("")),
            (br#"{"a":"x\"#, Some("x")),
            (br#"{"a":"x\\"#, Some("x\\")),
            (br#"{"a":"x\\\"#, Some("x\\")),
            (br#"{"a":"x\n"#, Some("x\n")),
            (br#"{"a":"x\u00"#, Some("x")),
            (br#"{"a":"x\u00e9"#, Some("x\u{e9}")),
            (br#"{"a":"x\ud83d"#, Some("x")),
            (br#"{"a":"x\ud83d\ude8"#, Some("x")),
            (br#"{"a":"x\uD83D\uDE80"#, Some("x\u{1f680}")),
            (br#"{"a":"x\ud83dabcdefghij"#, None),
            (b"{\"a\":\"x\xf0\x9f\x9a", Some("x")),
            (b"{\"a\":\"x\xff", None),
            (b"{\"a\":\"x\ny", None),
            (br#"{"a":"b""#, None),
            (br#"{"a":"\"","b":1"#, None),
            (b"", None),
        ] {
            assert_eq!(
                open_text(body).as_deref(),
                want,
                "{}",
                String::from_utf8_lossy(body)
            );
        }
    }
}
