//! The frames of Redis' protocol, versions 2 and 3: enough to tell where a message ends.

/// The length of the message that `bytes` starts with, if all of it is there.
pub(crate) fn frame_len(bytes: &[u8]) -> Option<usize> {
    let line = bytes.windows(2).position(|pair| pair == b"\r\n")? + 2;
    // A null is written as length -1 and has no body.
    let declared = || -> i64 {
        let digits = str::from_utf8(&bytes[1..line - 2]).expect("a length in digits");
        digits.parse().expect("a length in digits")
    };
    match bytes[0] {
        b'$' | b'!' | b'=' => match usize::try_from(declared()) {
            Ok(length) => Some(line + length + 2).filter(|end| *end <= bytes.len()),
            Err(_) => Some(line),
        },
        kind @ (b'*' | b'~' | b'>' | b'%' | b'|') => {
            let declared = usize::try_from(declared()).unwrap_or(0);
            let values = match kind {
                b'%' => declared * 2,
                // Attributes stand before the value that they describe, and belong to it.
                b'|' => declared * 2 + 1,
                _ => declared,
            };
            (0..values).try_fold(line, |end, _| Some(end + frame_len(&bytes[end..])?))
        }
        _ => Some(line),
    }
}

/// Whether a message answers no request.
pub(crate) fn is_push(frame: &[u8]) -> bool {
    frame.first() == Some(&b'>')
}
