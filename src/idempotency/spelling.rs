//! Spells strings and numbers as Python's `json.dumps` does; the same value always has the same spelling.

use std::fmt::{self, Write};
use std::str::FromStr;

use super::refusal::Refusal;

/// The decimal exponents that Python writes without an `e`: 0.0001 and 1000000000000000.0 are plain, while 1e-05 and
/// 1e+16 are not.
const PLAIN_EXPONENTS: std::ops::Range<i32> = -4..16;

/// The most digits an integer can have before Python refuses to print or parse it (its default since 3.11).
const MAX_DIGITS: usize = 4300;

/// Appends `text` as a JSON string of ASCII characters.
pub(super) fn string(out: &mut String, text: &str) {
    out.push('"');
    for character in text.chars() {
        match character {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            '\u{8}' => out.push_str("\\b"),
            '\u{c}' => out.push_str("\\f"),
            ' '..='~' => out.push(character),
            _ => {
                for unit in character.encode_utf16(&mut [0; 2]) {
                    append(out, format_args!("\\u{unit:04x}"));
                }
            }
        }
    }
    out.push('"');
}

/// Appends an integer.
pub(super) fn integer(out: &mut String, number: impl fmt::Display) {
    append(out, format_args!("{number}"));
}

/// Appends a float: the shortest digits that read back as the same number, always with a point or an exponent.
pub(super) fn double(out: &mut String, number: f64) -> Result<(), Refusal> {
    finite(number)?;
    scientific(out, &shortest(number));
    Ok(())
}

/// Appends a single-precision float with its own shortest digits, as it would travel in JSON: 0.1 and not
/// 0.10000000149011612. Python reads those digits as a double and prints the same.
pub(super) fn single(out: &mut String, number: f32) -> Result<(), Refusal> {
    finite(f64::from(number))?;
    scientific(out, &shortest(number));
    Ok(())
}

/// Appends a number given as JSON text, read as Python reads it: without point and exponent it is an integer of any
/// size, otherwise a double.
pub(super) fn number(out: &mut String, text: &str) -> Result<(), Refusal> {
    let digits = text.strip_prefix('-').unwrap_or(text);
    if !digits.starts_with(|first: char| first.is_ascii_digit()) {
        return Err(Refusal::new("is not a number although it claims to be one"));
    }
    if digits.bytes().all(|each| each.is_ascii_digit()) {
        if digits.len() > MAX_DIGITS {
            return Err(Refusal::new(format!(
                "is an integer of {} digits; {MAX_DIGITS} are allowed",
                digits.len()
            )));
        }
        out.push_str(if text == "-0" { "0" } else { text });
        return Ok(());
    }
    let number = text.parse().map_err(|_| Refusal::new("is not a number although it claims to be one"))?;
    double(out, number)
}

/// Refuses what JSON has no number for.
fn finite(number: f64) -> Result<(), Refusal> {
    if number.is_finite() {
        return Ok(());
    }
    let what = if number.is_nan() { "NaN" } else { "infinite" };
    Err(Refusal::new(format!("is {what}; a number must be finite")))
}

/// Returns the fewest digits that read back as the same number, and of those the nearest to it, as `-1.25e-7`.
fn shortest<T: fmt::LowerExp + FromStr + PartialEq>(number: T) -> String {
    let rust = format!("{number:e}");
    let fraction =
        rust.split_once('.').and_then(|(_, rest)| rest.split_once('e')).map_or("", |(digits, _)| digits);
    // 2^-25 is 2.98023223876953125e-8, halfway between two texts that both read back as itself. Rust takes the upper
    // one; Python takes the even one, as Rust does when told the number of digits.
    let even = format!("{number:.*e}", fraction.len());
    // At a power of two the nearest text of that length can be one that reads back as the number below.
    if even.parse().is_ok_and(|parsed: T| parsed == number) { even } else { rust }
}

/// Appends what Rust writes as `-1.25e-7` in Python's spelling, `-1.25e-07`.
fn scientific(out: &mut String, rust: &str) {
    let (mantissa, exponent) = rust.split_once('e').unwrap_or((rust, "0"));
    // Rust's exponent of a float is at most three digits and a sign.
    let exponent: i32 = exponent.parse().unwrap_or(0);
    if !PLAIN_EXPONENTS.contains(&exponent) {
        let sign = if exponent < 0 { '-' } else { '+' };
        append(out, format_args!("{mantissa}e{sign}{:02}", exponent.unsigned_abs()));
        return;
    }
    let unsigned = match mantissa.strip_prefix('-') {
        Some(unsigned) => {
            out.push('-');
            unsigned
        }
        None => mantissa,
    };
    let mut digits = unsigned.replace('.', "");
    let places = exponent.unsigned_abs() as usize;
    if exponent < 0 {
        append(out, format_args!("0.{:0<1$}{digits}", "", places - 1));
        return;
    }
    // At least one digit stands behind the point: 100 is "100.0".
    while digits.len() < places + 2 {
        digits.push('0');
    }
    let (whole, fraction) = digits.split_at(places + 1);
    append(out, format_args!("{whole}.{fraction}"));
}

/// Appends formatted text.
fn append(out: &mut String, text: fmt::Arguments<'_>) {
    // A `String` takes whatever is written to it.
    let _ = out.write_fmt(text);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spelled(write: impl FnOnce(&mut String) -> Result<(), Refusal>) -> Result<String, String> {
        let mut out = String::new();
        write(&mut out).map_err(|refusal| refusal.to_string())?;
        Ok(out)
    }

    #[test]
    fn doubles_are_spelled_as_python_spells_them() {
        // The right-hand sides were printed by Python 3.11: `repr(number)`.
        for (number, python) in [
            (0.0, "0.0"),
            (-0.0, "-0.0"),
            (1.0, "1.0"),
            (-1.5, "-1.5"),
            (100.0, "100.0"),
            (123_456.789, "123456.789"),
            (0.1, "0.1"),
            (0.001_25, "0.00125"),
            (0.000_1, "0.0001"),
            (-0.000_123, "-0.000123"),
            (0.000_01, "1e-05"),
            (0.000_099_9, "9.99e-05"),
            (-1.25e-7, "-1.25e-07"),
            (1e15, "1000000000000000.0"),
            (9_999_999_999_999_998.0, "9999999999999998.0"),
            (1e16, "1e+16"),
            (1.234_567_890_123_456_8e17, "1.2345678901234568e+17"),
            (1e22, "1e+22"),
            (1e23, "1e+23"),
            (1e100, "1e+100"),
            (5e-324, "5e-324"),
            (2.225_073_858_507_201_4e-308, "2.2250738585072014e-308"),
            (f64::MAX, "1.7976931348623157e+308"),
            (2f64.powi(-44), "5.684341886080802e-14"),
            (2f64.powi(-25), "2.9802322387695312e-08"),
            (9_007_199_254_740_993.0, "9007199254740992.0"),
        ] {
            assert_eq!(spelled(|out| double(out, number)).as_deref(), Ok(python));
        }
    }

    #[test]
    fn singles_keep_the_digits_they_travel_with() {
        for (number, python) in [
            (0.1, "0.1"),
            (16_777_216.0, "16777216.0"),
            (1e-5, "1e-05"),
            (f32::MAX, "3.4028235e+38"),
            (1e-45, "1e-45"),
        ] {
            assert_eq!(spelled(|out| single(out, number)).as_deref(), Ok(python));
        }
    }

    #[test]
    fn numbers_without_a_finite_value_are_refused() {
        for (number, what) in
            [(f64::NAN, "NaN"), (f64::INFINITY, "infinite"), (f64::NEG_INFINITY, "infinite")]
        {
            let refused = Err(format!("payload is {what}; a number must be finite"));
            assert_eq!(spelled(|out| double(out, number)), refused);
            assert_eq!(spelled(|out| single(out, number as f32)), refused);
        }
    }

    #[test]
    fn number_text_is_read_as_python_reads_it() {
        for (text, python) in [
            ("7", "7"),
            ("-0", "0"),
            ("-0.0", "-0.0"),
            ("1E5", "100000.0"),
            ("1e16", "1e+16"),
            ("1.10", "1.1"),
            ("340282366920938463463374607431768211456", "340282366920938463463374607431768211456"),
        ] {
            assert_eq!(spelled(|out| number(out, text)).as_deref(), Ok(python));
        }
        for text in ["", "-", "1e400", "x", "inf", "NaN", "+1", "1.2.3", "1 ", &"9".repeat(4301)] {
            assert!(spelled(|out| number(out, text)).is_err(), "{text}");
        }
    }

    #[test]
    fn strings_are_ascii_and_escaped_as_python_escapes_them() {
        for (text, python) in [
            ("", r#""""#),
            ("a/b ~", r#""a/b ~""#),
            ("\"\\\n\r\t\u{8}\u{c}", r#""\"\\\n\r\t\b\f""#),
            ("\0\u{1f}\u{7f}\u{80}", r#""\u0000\u001f\u007f\u0080""#),
            ("é\u{2028}\u{ffff}", r#""\u00e9\u2028\uffff""#),
            ("😀\u{10ffff}", r#""\ud83d\ude00\udbff\udfff""#),
        ] {
            let mut out = String::new();
            string(&mut out, text);
            assert_eq!(out, python);
        }
    }
}
