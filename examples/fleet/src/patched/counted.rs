//! Functions of the module that trap or stall once another was called so often: a VM works first and breaks later.
//!
//! Each patch counts in a global of its own, so every VM counts for itself.

use std::fs;
use std::path::Path;

use wasmparser::{Parser, Payload, TypeRef};

use super::{
    BR_IF, CODE_SECTION, END, HEADER_BYTES, I64, I64_CONST, LOOP, NO_RESULT, PatchError, own_function,
    put_signed, put_size, put_sized, sections, take_size, with_body,
};

/// One function that breaks.
#[derive(Debug, Clone, Copy)]
pub struct Counted<'a> {
    /// The exported function.
    pub export: &'a str,
    /// The exported function whose calls are counted, perhaps the same; a call counts as soon as it begins.
    pub calls_of: &'a str,
    /// At which count it breaks.
    pub when: When,
    /// How.
    pub act: Act,
}

/// A condition on the count.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum When {
    /// More calls than this.
    Above(u32),
    /// Exactly so many.
    At(u32),
    /// Fewer.
    Below(u32),
}

/// What the function does then, before its own code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Act {
    /// It traps.
    Trap,
    /// It looks at the clock for so many milliseconds first.
    Stall(u32),
}

/// The module at `from` with all of these patches; of several on one function the first acts first.
///
/// # Errors
/// When the file cannot be read, is no module, has no globals, or exports no such function of its own.
pub fn counted(from: &Path, patches: &[Counted<'_>]) -> Result<Vec<u8>, PatchError> {
    let bytes = fs::read(from)?;
    let sections = sections(&bytes)?;
    let section = |wanted: u8| {
        let found = sections.iter().find(|(id, _)| *id == wanted);
        found.map(|(_, section)| section.to_vec())
    };
    // The shipped module imports no globals, so its own are numbered from 0.
    let mut globals = section(GLOBAL_SECTION).ok_or(PatchError::Malformed)?;
    let mut code = section(CODE_SECTION).ok_or(PatchError::Malformed)?;
    for patch in patches.iter().rev() {
        let counter = add_global(&mut globals, &[I32, MUTABLE, I32_CONST, 0, END])?;
        let until = add_global(&mut globals, &[I64, MUTABLE, I64_CONST, 0, END])?;
        let (breaks, _) = own_function(&bytes, patch.export)?;
        let clock = imported_function(&bytes, CLOCK)?;
        let breaking = patch.code(counter, until, clock);
        code = with_body(&code, breaks, |body| preceded(body, &breaking))?;
        let (counts, _) = own_function(&bytes, patch.calls_of)?;
        code = with_body(&code, counts, |body| preceded(body, &count(counter)))?;
    }
    let mut patched = bytes.get(..HEADER_BYTES).ok_or(PatchError::Malformed)?.to_vec();
    for (id, section) in sections {
        patched.push(id);
        put_sized(
            &mut patched,
            match id {
                GLOBAL_SECTION => &globals,
                CODE_SECTION => &code,
                _ => section,
            },
        );
    }
    Ok(patched)
}

impl Counted<'_> {
    /// Breaks if the count says so.
    fn code(&self, counter: usize, until: usize, clock: usize) -> Vec<u8> {
        let (compare, count) = match self.when {
            When::Above(count) => (I32_GT_U, count),
            When::At(count) => (I32_EQ, count),
            When::Below(count) => (I32_LT_U, count),
        };
        let mut code = with_number(GLOBAL_GET, counter);
        code.push(I32_CONST);
        put_signed(&mut code, count.into());
        code.extend_from_slice(&[compare, IF, NO_RESULT]);
        match self.act {
            Act::Trap => code.push(UNREACHABLE),
            Act::Stall(ms) => {
                code.extend(now(clock));
                code.push(I64_CONST);
                put_signed(&mut code, u64::from(ms) * 1_000_000);
                code.push(I64_ADD);
                code.extend(with_number(GLOBAL_SET, until));
                code.extend_from_slice(&[LOOP, NO_RESULT]);
                code.extend(now(clock));
                code.extend(with_number(GLOBAL_GET, until));
                code.extend_from_slice(&[I64_LT_U, BR_IF, 0, END]);
            }
        }
        code.push(END);
        code
    }
}

/// The time in nanoseconds, by way of eight bytes at the far end of the stack, which nothing reaches.
fn now(clock: usize) -> Vec<u8> {
    let mut code = vec![I32_CONST, SCRATCH];
    code.extend(with_number(CALL, clock));
    code.extend_from_slice(&[DROP, I32_CONST, SCRATCH, I64_LOAD, 3, 0]);
    code
}

fn count(counter: usize) -> Vec<u8> {
    let mut code = with_number(GLOBAL_GET, counter);
    code.extend_from_slice(&[I32_CONST, 1, I32_ADD]);
    code.extend(with_number(GLOBAL_SET, counter));
    code
}

fn with_number(instruction: u8, number: usize) -> Vec<u8> {
    let mut code = vec![instruction];
    put_size(&mut code, number);
    code
}

/// Adds a global to a section of them and gives its number.
fn add_global(section: &mut Vec<u8>, global: &[u8]) -> Result<usize, PatchError> {
    let mut rest = section.as_slice();
    let count = take_size(&mut rest)?;
    let mut longer = Vec::new();
    put_size(&mut longer, count + 1);
    longer.extend_from_slice(rest);
    longer.extend_from_slice(global);
    *section = longer;
    Ok(count)
}

/// Number of a function that the host provides.
fn imported_function(bytes: &[u8], name: &str) -> Result<usize, PatchError> {
    let mut number = 0;
    for payload in Parser::new(0).parse_all(bytes) {
        if let Payload::ImportSection(section) = payload? {
            for import in section.into_imports() {
                let import = import?;
                if import.name == name {
                    return Ok(number);
                }
                number += usize::from(matches!(import.ty, TypeRef::Func(_)));
            }
        }
    }
    Err(PatchError::NoFunction(name.to_owned()))
}

/// A function's body with code before its own.
fn preceded(body: &[u8], code: &[u8]) -> Result<Vec<u8>, PatchError> {
    let mut rest = body;
    for _ in 0..take_size(&mut rest)? {
        take_size(&mut rest)?;
        rest = rest.get(1..).ok_or(PatchError::Malformed)?;
    }
    let declarations = body.len() - rest.len();
    let (declarations, own) = body.split_at(declarations);
    Ok([declarations, code, own].concat())
}

const CLOCK: &str = "proxy_get_current_time_nanoseconds";
const SCRATCH: u8 = 16;
const GLOBAL_SECTION: u8 = 6;
const I32: u8 = 0x7f;
const MUTABLE: u8 = 1;
const UNREACHABLE: u8 = 0x00;
const IF: u8 = 0x04;
const GLOBAL_GET: u8 = 0x23;
const GLOBAL_SET: u8 = 0x24;
const I32_CONST: u8 = 0x41;
const CALL: u8 = 0x10;
const DROP: u8 = 0x1a;
const I64_LOAD: u8 = 0x29;
const I64_LT_U: u8 = 0x54;
const I64_ADD: u8 = 0x7c;
const I32_EQ: u8 = 0x46;
const I32_LT_U: u8 = 0x49;
const I32_GT_U: u8 = 0x4b;
const I32_ADD: u8 = 0x6a;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::wasm::build_wasm;

    #[test]
    fn a_counted_module_has_two_more_globals_a_patch_and_code_that_parses() {
        let wasm = build_wasm().unwrap();
        let patch = |calls_of, act| Counted {
            export: "proxy_on_tick",
            calls_of,
            when: When::Above(300),
            act,
        };
        let patches = [
            patch("proxy_on_request_headers", Act::Trap),
            patch("proxy_on_tick", Act::Stall(3000)),
        ];
        let globals = |bytes: &[u8]| {
            let mut globals = 0;
            for payload in Parser::new(0).parse_all(bytes) {
                match payload.unwrap() {
                    Payload::GlobalSection(section) => globals = section.count(),
                    Payload::CodeSectionEntry(body) => {
                        let operators = body.get_operators_reader().unwrap();
                        assert!(operators.into_iter().all(|operator| operator.is_ok()));
                    }
                    _ => {}
                }
            }
            globals
        };
        let before = globals(&fs::read(&wasm).unwrap());
        assert_eq!(globals(&counted(&wasm, &patches).unwrap()), before + 4);
    }
}
