//! The shipped module with one thing changed in its bytes, so that what is tested is what ships and nothing in the source
//! has to know of it.

use std::path::Path;
use std::{fmt, fs, io};

use wasmparser::{BinaryReaderError, ExternalKind, Parser, Payload, TypeRef, ValType};

mod counted;

pub use counted::{Act, Counted, When, counted};

/// The module at `from`, except that the exported function traps as soon as it is called.
///
/// # Errors
/// When the file cannot be read, is no module, or exports no such function of its own.
pub fn trap_in(from: &Path, export: &str) -> Result<Vec<u8>, PatchError> {
    patch(from, export, |_, _| Ok(TRAP.to_vec()))
}

/// The module at `from`, except that the exported function first counts to `rounds` each time it is called: about a second
/// for 2 000 000 000 of them.
///
/// # Errors
/// As [`trap_in`].
pub fn stall_in(from: &Path, export: &str, rounds: u64) -> Result<Vec<u8>, PatchError> {
    patch(from, export, |parameters, body| {
        let mut rest = body;
        let groups = take_size(&mut rest)?;
        let declared = rest;
        let mut locals = parameters;
        for _ in 0..groups {
            locals += take_size(&mut rest)?;
            rest = rest.get(1..).ok_or(PatchError::Malformed)?;
        }
        let mut patched = Vec::new();
        put_size(&mut patched, groups + 1);
        patched.extend_from_slice(&declared[..declared.len() - rest.len()]);
        patched.extend_from_slice(&[1, I64]);
        let mut counter = Vec::new();
        put_size(&mut counter, locals);
        patched.push(I64_CONST);
        put_signed(&mut patched, rounds);
        patched.push(LOCAL_SET);
        patched.extend_from_slice(&counter);
        patched.extend_from_slice(&[LOOP, NO_RESULT, LOCAL_GET]);
        patched.extend_from_slice(&counter);
        patched.extend_from_slice(&[I64_CONST, 1, I64_SUB, LOCAL_TEE]);
        patched.extend_from_slice(&counter);
        patched.extend_from_slice(&[I64_CONST, 0, I64_NE, BR_IF, 0, END]);
        patched.extend_from_slice(rest);
        Ok(patched)
    })
}

/// The module at `from` as another build of the same code: with a section of its own that nobody reads.
///
/// # Errors
/// When the file cannot be read.
pub fn another_build(from: &Path, mark: &str) -> Result<Vec<u8>, PatchError> {
    let mut bytes = fs::read(from)?;
    let mut section = Vec::new();
    put_sized(&mut section, b"build");
    section.extend_from_slice(mark.as_bytes());
    bytes.push(CUSTOM_SECTION);
    put_sized(&mut bytes, &section);
    Ok(bytes)
}

/// Why there is no patched module.
#[derive(Debug)]
pub enum PatchError {
    /// The file cannot be read.
    Io(io::Error),
    /// It is no WebAssembly module.
    Module(BinaryReaderError),
    /// The function is not exported, or is imported, or has a second name.
    NoFunction(String),
    /// A section ends too early.
    Malformed,
}

impl fmt::Display for PatchError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(cause) => write!(f, "the module cannot be read: {cause}"),
            Self::Module(cause) => write!(f, "not a WebAssembly module: {cause}"),
            Self::NoFunction(name) => write!(f, "no function of its own is exported as {name} alone"),
            Self::Malformed => f.write_str("a section of the module ends too early"),
        }
    }
}

impl std::error::Error for PatchError {}

impl From<io::Error> for PatchError {
    fn from(cause: io::Error) -> Self {
        Self::Io(cause)
    }
}

impl From<BinaryReaderError> for PatchError {
    fn from(cause: BinaryReaderError) -> Self {
        Self::Module(cause)
    }
}

/// Gives one function another body, made of the number of its parameters and the body it has.
fn patch(
    from: &Path,
    export: &str,
    body: impl Fn(usize, &[u8]) -> Result<Vec<u8>, PatchError>,
) -> Result<Vec<u8>, PatchError> {
    let bytes = fs::read(from)?;
    let (own, parameters) = own_function(&bytes, export)?;
    let mut patched = bytes.get(..HEADER_BYTES).ok_or(PatchError::Malformed)?.to_vec();
    for (id, section) in sections(&bytes)? {
        patched.push(id);
        let section = match id {
            CODE_SECTION => with_body(section, own, |old| body(parameters, old))?,
            _ => section.to_vec(),
        };
        put_sized(&mut patched, &section);
    }
    Ok(patched)
}

/// Place of an exported function among the module's own, and the number of its parameters.
fn own_function(bytes: &[u8], export: &str) -> Result<(usize, usize), PatchError> {
    let (mut imported, mut exports) = (0, Vec::new());
    let (mut types, mut functions): (Vec<usize>, Vec<u32>) = (Vec::new(), Vec::new());
    for payload in Parser::new(0).parse_all(bytes) {
        match payload? {
            Payload::TypeSection(section) => {
                for kind in section.into_iter_err_on_gc_types() {
                    let parameters: &[ValType] = kind.as_ref().map_or(&[], |kind| kind.params());
                    types.push(parameters.len());
                }
            }
            Payload::ImportSection(section) => {
                for import in section.into_imports() {
                    imported += usize::from(matches!(import?.ty, TypeRef::Func(_)));
                }
            }
            Payload::FunctionSection(section) => {
                functions = section.into_iter().collect::<Result<_, _>>()?;
            }
            Payload::ExportSection(section) => {
                for export in section {
                    let export = export?;
                    if export.kind == ExternalKind::Func {
                        exports.push((export.name.to_owned(), export.index as usize));
                    }
                }
            }
            _ => {}
        }
    }
    let missing = || PatchError::NoFunction(export.to_owned());
    let (_, function) = exports
        .iter()
        .find(|(name, _)| name == export)
        .ok_or_else(missing)?;
    if exports.iter().filter(|(_, index)| index == function).count() != 1 {
        return Err(missing());
    }
    let own = function.checked_sub(imported).ok_or_else(missing)?;
    let kind = *functions.get(own).ok_or_else(missing)?;
    let parameters = *types.get(kind as usize).ok_or(PatchError::Malformed)?;
    Ok((own, parameters))
}

/// The sections after the header: their ids and contents.
fn sections(bytes: &[u8]) -> Result<Vec<(u8, &[u8])>, PatchError> {
    let mut sections = Vec::new();
    let mut rest = bytes.get(HEADER_BYTES..).ok_or(PatchError::Malformed)?;
    while let [id, tail @ ..] = rest {
        rest = tail;
        sections.push((*id, take_sized(&mut rest)?));
    }
    Ok(sections)
}

/// A code section in which the body at `index` is another one.
fn with_body(
    section: &[u8],
    index: usize,
    body: impl Fn(&[u8]) -> Result<Vec<u8>, PatchError>,
) -> Result<Vec<u8>, PatchError> {
    let mut rest = section;
    let count = take_size(&mut rest)?;
    let mut patched = Vec::new();
    put_size(&mut patched, count);
    for number in 0..count {
        let old = take_sized(&mut rest)?;
        if number == index {
            put_sized(&mut patched, &body(old)?);
        } else {
            put_sized(&mut patched, old);
        }
    }
    Ok(patched)
}

/// LEB128, as the binary format has it.
fn take_size(bytes: &mut &[u8]) -> Result<usize, PatchError> {
    let (mut size, mut shift) = (0, 0);
    loop {
        let (&byte, rest) = bytes.split_first().ok_or(PatchError::Malformed)?;
        *bytes = rest;
        size |= usize::from(byte & 0x7f) << shift;
        shift += 7;
        if byte < 0x80 {
            return Ok(size);
        }
        if shift > 28 {
            return Err(PatchError::Malformed);
        }
    }
}

fn take_sized<'a>(bytes: &mut &'a [u8]) -> Result<&'a [u8], PatchError> {
    let size = take_size(bytes)?;
    let (taken, rest) = bytes.split_at_checked(size).ok_or(PatchError::Malformed)?;
    *bytes = rest;
    Ok(taken)
}

fn put_size(bytes: &mut Vec<u8>, mut size: usize) {
    while size >= 0x80 {
        bytes.push((size & 0x7f) as u8 | 0x80);
        size >>= 7;
    }
    bytes.push(size as u8);
}

/// Signed LEB128 of a number that is not negative.
fn put_signed(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x40 {
        bytes.push((number & 0x7f) as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

fn put_sized(bytes: &mut Vec<u8>, content: &[u8]) {
    put_size(bytes, content.len());
    bytes.extend_from_slice(content);
}

/// Magic and version.
const HEADER_BYTES: usize = 8;
const CUSTOM_SECTION: u8 = 0;
const CODE_SECTION: u8 = 10;
/// No locals, `unreachable`, `end`.
const TRAP: &[u8] = &[0, 0x00, 0x0b];
const I64: u8 = 0x7e;
const NO_RESULT: u8 = 0x40;
const LOOP: u8 = 0x03;
const BR_IF: u8 = 0x0d;
const END: u8 = 0x0b;
const LOCAL_GET: u8 = 0x20;
const LOCAL_SET: u8 = 0x21;
const LOCAL_TEE: u8 = 0x22;
const I64_CONST: u8 = 0x42;
const I64_NE: u8 = 0x52;
const I64_SUB: u8 = 0x7d;
