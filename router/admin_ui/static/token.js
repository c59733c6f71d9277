// The admin token, kept as long as this tab is open and nowhere else.

const KEY = "twinfang.admin_token";

export const readToken = () => sessionStorage.getItem(KEY) ?? "";
export const keepToken = (token) => sessionStorage.setItem(KEY, token);
export const forgetToken = () => sessionStorage.removeItem(KEY);
